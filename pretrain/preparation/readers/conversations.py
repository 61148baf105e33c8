"""Prompts with answers and conversations: fields of a record to segments, learned or not.

    prompt, response; messages       -> turns -> the template around them -> build_record
    prompt, chosen and rejected      -> the same of each answer           -> build_preference
    a record, and its label          -> the record, wanted or not         -> build_feedback

Turns that both sides of a preference begin with have no loss, an earlier answer neither.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import compress
from typing import Any

from pretrain.config.prepare import InputConfig
from pretrain.config.texts.templates import Template, is_jinja, turns_of
from pretrain.preparation.filters import Document
from pretrain.preparation.readers.messages import (
    LEARNED_FIELDS,
    Messages,
    check_learned,
    read_messages,
    read_system,
    read_tools,
)
from pretrain.preparation.readers.record_fields import RecordError, bad_field, encode, kind_of, text_of
from pretrain.tokenizer.chat_template import ASSISTANT as TARGET_ROLE
from pretrain.tokenizer.chat_template import ChatTemplate, ChatTemplateError, load_chat_template

# Fields of Alpaca's records (Taori et al. 2023), and of both that LLaMA-Factory adds.
_INSTRUCTION = "instruction"
OPTIONAL_INPUT = "input"
_OUTPUT = "output"
_HISTORY = "history"
_MAX_KEY_CHARS = 80
EXTRA_FIELDS = ("system", "tools", _HISTORY, *LEARNED_FIELDS)

# (text, loss mask) of each part of a record.
Segments = tuple[tuple[str, bool], ...]


def build_record(record: Mapping[str, Any], config: InputConfig, consumed_bytes: int) -> Document:
    """Makes a document of a prompt with its response, or of messages. Raises: RecordError."""
    check_learned(record)
    template = _chat_template(config)
    messages = read_system(record, template)
    if config.messages_field is not None:
        names = [config.messages_field]
        messages.append(read_messages(record, config.messages_field, template))
    else:
        prompts, response_field = prompt_fields(config, record)
        names = [*prompts, response_field, _HISTORY]
        prompt = _join_prompt(record, prompts)
        if config.prompt_field == _INSTRUCTION and record.get(OPTIONAL_INPUT):
            raise RecordError(
                f"field {OPTIONAL_INPUT!r} belongs to the instruction, and prompt_field does not name it",
                f"use prompt_field=[{_INSTRUCTION}, {OPTIONAL_INPUT}], or [{_INSTRUCTION}] to leave it out",
            )
        response, _ = text_of(record, response_field, "response_field")
        turns = [*_earlier_turns(record), ("user", prompt), (TARGET_ROLE, response)]
        messages.append(Messages([{"role": role, "content": text} for role, text in turns]))
    if [one["role"] for one in messages.messages[:2]] == ["system", "system"] and record.get("system"):
        raise RecordError(
            "field 'system' and the first turn are both the system's",
            "leave one out",
        )
    tools = read_tools(record, messages)
    document = _write(messages, template, config, tools, consumed_bytes)
    return _with_unused(document, record, names, template, messages.unused)


def _earlier_turns(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the turns of `history`, pairs of a prompt and a response. Raises: RecordError."""
    turns = []
    history = record.get(_HISTORY) or []
    for number, pair in enumerate(history if isinstance(history, list) else [history]):
        if not isinstance(pair, list) or [kind_of(text) for text in pair] != ["a string"] * 2:
            raise RecordError(
                f"{_HISTORY}[{number}] is no pair of a prompt and a response",
                "write a list of two strings, or rename the field",
            )
        turns += [("user", pair[0]), (TARGET_ROLE, pair[1])]
    return turns


def _with_unused(
    document: Document,
    record: Mapping[str, Any],
    names: Collection[str],
    template: ChatTemplate | None,
    unused: Counter[str],
) -> Document:
    """Returns the document with the keys of its record that nothing used."""
    used = {*names, "system"}
    used |= {"tools"} if template is not None and template.takes("tools") else set()
    for key, value in record.items():
        if key not in used and value not in (None, "", [], {}):
            unused[key] += 1
    document.unused = {key[:_MAX_KEY_CHARS]: count for key, count in unused.items()}
    return document


def _chat_template(config: InputConfig) -> ChatTemplate | None:
    """Returns the chat template of transformers; None: a text for each role, or none."""
    if not is_jinja(config.template):
        return None
    assert isinstance(config.template, dict), "prepare resolves it"
    return load_chat_template(config.template)


def build_preference(record: Mapping[str, Any], config: InputConfig, consumed_bytes: int) -> Document:
    """Makes a document of a prompt with two answers. Raises: RecordError."""
    template = _chat_template(config)
    chosen = _side(record, config, config.chosen_field, "chosen_field", template)
    rejected = _side(record, config, config.rejected_field, "rejected_field", template)
    both = f"{config.chosen_field!r} and {config.rejected_field!r}"
    if chosen.messages == rejected.messages:
        differ = f".{config.chosen_field} != .{config.rejected_field}"
        raise RecordError(
            f"{both} are the same answer",
            f"leave such records out: jq -c 'select({differ})'",
        )
    turns = enumerate(zip(chosen.messages, rejected.messages, strict=False))
    shared = next((number for number, (one, other) in turns if one != other), len(chosen.messages))
    shared = min(shared, len(chosen.messages) - 1, len(rejected.messages) - 1)
    if shared == 0:
        raise RecordError(
            f"{both} have no turn in common before the answer",
            "give the prompt in both, or in prompt_field",
        )
    tools = read_tools(record, chosen)
    read_tools(record, rejected)
    for side in (chosen, rejected):
        side.silent |= {*range(shared)}
    document = _write(chosen, template, config, tools, consumed_bytes)
    document.rejected = _write(rejected, template, config, tools, 0)
    names = [*names_of_prompt(config), config.chosen_field, config.rejected_field]
    return _with_unused(document, record, names, template, chosen.unused + rejected.unused)


def build_feedback(record: Mapping[str, Any], config: InputConfig, consumed_bytes: int) -> Document:
    """Makes a document of a prompt with an answer that is wanted, or is not. Raises: RecordError."""
    document = build_record(record, config, consumed_bytes)
    is_wanted = record.get(config.label_field)
    if not isinstance(is_wanted, bool):
        raise bad_field(record, config.label_field, "true or false", "label_field")
    document.is_unwanted = not is_wanted
    document.unused = {key: count for key, count in document.unused.items() if key != config.label_field}
    return document


def _side(
    record: Mapping[str, Any],
    config: InputConfig,
    name: str,
    option: str,
    template: ChatTemplate | None,
) -> Messages:
    """Returns prompt and answer as messages. Raises: RecordError."""
    prompts = names_of_prompt(config)
    messages = read_system(record, template)
    answer = record.get(name)
    if isinstance(answer, list):
        answers = read_messages(record, name, template)
    else:
        text, _ = text_of(record, name, option)
        answers = Messages([{"role": TARGET_ROLE, "content": text}])
    if isinstance(record.get(prompts[0]), list):
        messages.append(read_messages(record, prompts[0], template))
    # A list of messages has the prompt at its beginning, unless an answer is there.
    elif not answers.messages or answers.messages[0]["role"] == TARGET_ROLE:
        messages.append(Messages([{"role": "user", "content": _join_prompt(record, prompts)}]))
    messages.append(answers)
    return messages


def _write(
    found: Messages,
    template: ChatTemplate | None,
    config: InputConfig,
    tools: Any,
    consumed_bytes: int,
) -> Document:
    """Makes a document of messages, of which the assistant's are learned. Raises: RecordError."""
    if template is not None:
        return _render(found, template, tools, consumed_bytes)
    turns = [(message["role"], message["content"]) for message in found.messages]
    learned = found.learned
    segments: Segments = tuple((text, is_own) for (_, text), is_own in zip(turns, learned, strict=True))
    markers = frozenset[int]()
    if config.template is not None and any(learned):  # others are left out
        segments, markers = apply_template(turns, config.template, found.silent)
    text = "".join(part for part, _ in segments)
    return Document(text, text.encode(), consumed_bytes, segments=segments, markers=markers)


def _render(found: Messages, template: ChatTemplate, tools: Any, consumed_bytes: int) -> Document:
    """Makes a document of a conversation by the chat template. Raises: RecordError."""
    weights = found.learned
    if not any(map(_says, compress(found.messages, weights))):
        # Without the template's text, by which filters count it among those that have no answer.
        contents = [str(one.get("content") or "") for one in found.messages]
        text = "".join(contents)
        bare = tuple(zip(contents, weights, strict=True))
        return Document(text, encode(text), consumed_bytes, segments=bare)
    try:
        parts = template.segments(found.messages, tools, found.silent)
    except ChatTemplateError as error:
        raise RecordError(
            str(error),
            "correct the record, or mark the assistant's turns in a copy of the template by {% generation %}",
        ) from None
    text = "".join(part.text for part in parts)
    for turn, is_own in enumerate(weights):
        words = _last_words(found.messages[turn].get("content"))
        if is_own and words and words[-1] not in text:
            raise RecordError(
                f"turn {turn}, of the assistant, is not in the chat template's text",
                "use a template that writes it: some write content in parts alone",
            )
    segments = tuple((part.text, part.is_learned) for part in parts)
    spelled = frozenset(number for number, part in enumerate(parts) if part.is_spelled)
    return Document(text, encode(text), consumed_bytes, segments=segments, spelled=spelled)


def _says(message: Mapping[str, Any]) -> bool:
    """Returns whether a turn has words or calls."""
    return bool(str(message.get("content") or "").strip() or message.get("tool_calls"))


def _last_words(content: Any) -> list[str]:
    """Returns the words of a content, or of its last part."""
    last = content[-1]["text"] if isinstance(content, list) and content else content
    return last.split() if isinstance(last, str) else []


def prompt_fields(config: InputConfig, known: Collection[str]) -> tuple[list[str], str]:
    """Returns the fields of prompt and response; Alpaca's where records have only these."""
    is_default = (config.prompt_field, config.response_field) == ("prompt", "response")
    if is_default and _INSTRUCTION in known and not {"prompt", "response"} & {*known}:
        return [_INSTRUCTION, OPTIONAL_INPUT], _OUTPUT
    return names_of_prompt(config), config.response_field


def names_of_prompt(config: InputConfig) -> list[str]:
    """Returns `prompt_field` as a list."""
    return [config.prompt_field] if isinstance(config.prompt_field, str) else config.prompt_field


def _join_prompt(record: Mapping[str, Any], names: list[str]) -> str:
    """Returns the fields of a prompt that are there, the first at least, a blank line between."""
    further = [name for name in names[1:] if record.get(name) not in (None, "")]
    parts = [text_of(record, name, "prompt_field")[0] for name in (names[0], *further)]
    return "\n\n".join(parts)


def apply_template(
    turns: list[tuple[str, str]], template: Template, silent: Collection[int] = ()
) -> tuple[Segments, frozenset[int]]:
    """Writes a template around the turns; returns the segments, and which are the template's.

    The assistant's turns are learned, but for the turns `silent`. Raises: RecordError.
    """
    texts = turns_of(template)
    segments: list[tuple[str, bool]] = []
    markers: set[int] = set()
    for number, (role, text) in enumerate(turns):
        if role not in texts:
            names = ", ".join(texts)
            raise RecordError(f"role {role!r} is not in the template", f"add it to {names}")
        before, after = texts[role]
        is_learned = role == TARGET_ROLE and number not in silent
        if before:
            markers.add(len(segments))
            segments.append((before, False))
        if text:
            segments.append((text, is_learned))
        if after:
            markers.add(len(segments))
            segments.append((after, is_learned))
    return tuple(segments), frozenset(markers)
