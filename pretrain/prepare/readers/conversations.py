"""Prompts with answers and conversations: fields of a record to segments, learned or not.

    prompt, response; messages       -> turns -> the template around them -> build_record
    prompt, chosen and rejected      -> the same of each answer           -> build_preference

Turns that both sides of a preference begin with have no loss, an earlier answer neither.
"""

from collections.abc import Collection, Mapping
from typing import Any

from pretrain.config.prepare import InputConfig
from pretrain.config.texts.templates import Template, is_jinja, turns_of
from pretrain.prepare.filters import Document
from pretrain.prepare.readers.record_fields import (
    RecordError,
    bad_field,
    describe,
    encode,
    kind_of,
    text_of,
)
from pretrain.tokenizer import ASSISTANT as TARGET_ROLE
from pretrain.tokenizer import ChatTemplateError, load_chat_template

ROLES = ("system", "developer", "user", "tool", "function", TARGET_ROLE)

# Keys and roles of ShareGPT's messages.
_ALIASES = {"role": "from", "content": "value"}
_ROLES_OF = {"human": "user", "gpt": TARGET_ROLE}
_MESSAGE_FIX = 'write {"role": "user", "content": "..."}'

# Fields of Alpaca's records (Taori et al. 2023).
_INSTRUCTION = "instruction"
OPTIONAL_INPUT = "input"
_OUTPUT = "output"

# (text, loss mask) of each part of a record.
Segments = tuple[tuple[str, bool], ...]


def build_record(record: Mapping[str, Any], config: InputConfig, consumed_bytes: int) -> Document:
    """Makes a document of a prompt with its response, or of messages. Raises: RecordError."""
    if config.messages_field is not None and is_jinja(config.template):
        messages = _messages(record, config.messages_field)
        return _render(messages, config, record.get("tools"), consumed_bytes)
    if config.messages_field is not None:
        turns = _turns(record, config.messages_field)
    else:
        names, response_field = prompt_fields(config, record)
        prompt = _join_prompt(record, names)
        if config.prompt_field == _INSTRUCTION and record.get(OPTIONAL_INPUT):
            fix = f"use prompt_field=[{_INSTRUCTION}, {OPTIONAL_INPUT}], or [{_INSTRUCTION}] to leave it out"
            raise RecordError(
                f"field {OPTIONAL_INPUT!r} belongs to the instruction, and prompt_field does not name it",
                fix,
            )
        response, _ = text_of(record, response_field, "response_field")
        turns = [("user", prompt), (TARGET_ROLE, response)]
    if is_jinja(config.template):
        messages = [{"role": role, "content": text} for role, text in turns]
        return _render(messages, config, None, consumed_bytes)
    return _write(turns, config, consumed_bytes)


def _write(turns: list[tuple[str, str]], config: InputConfig, consumed_bytes: int, first: int = 0) -> Document:
    """Makes a document of turns, of which the assistant's are learned from number `first` on."""
    learned = [role == TARGET_ROLE and number >= first for number, (role, _) in enumerate(turns)]
    segments: Segments = tuple((text, is_own) for (_, text), is_own in zip(turns, learned, strict=True))
    markers = frozenset[int]()
    if config.template is not None and any(learned):  # others are left out
        segments, markers = apply_template(turns, config.template, first)
    text = "".join(part for part, _ in segments)
    return Document(text, text.encode(), consumed_bytes, segments=segments, markers=markers)


def build_preference(record: Mapping[str, Any], config: InputConfig, consumed_bytes: int) -> Document:
    """Makes a document of a prompt with two answers. Raises: RecordError."""
    chosen = _side(record, config, config.chosen_field, "chosen_field")
    rejected = _side(record, config, config.rejected_field, "rejected_field")
    both = f"{config.chosen_field!r} and {config.rejected_field!r}"
    if chosen == rejected:
        names = f".{config.chosen_field} != .{config.rejected_field}"
        fix = f"leave such records out: jq -c 'select({names})'"
        raise RecordError(f"{both} are the same answer", fix)
    turns = enumerate(zip(chosen, rejected, strict=False))
    shared = next((number for number, (one, other) in turns if one != other), len(chosen))
    shared = min(shared, len(chosen) - 1, len(rejected) - 1)
    if shared == 0:
        fix = "give the prompt in both, or in prompt_field"
        raise RecordError(f"{both} have no turn in common before the answer", fix)
    document = _build_side(chosen, config, record.get("tools"), consumed_bytes, shared)
    document.rejected = _build_side(rejected, config, record.get("tools"), 0, shared)
    return document


def _side(record: Mapping[str, Any], config: InputConfig, name: str, option: str) -> list[dict[str, Any]]:
    """Returns prompt and answer as messages. Raises: RecordError."""
    prompts = names_of_prompt(config)
    read = _messages if is_jinja(config.template) else _plain_messages
    given = record.get(prompts[0])
    answer = record.get(name)
    if not isinstance(answer, list):
        text, _ = text_of(record, name, option)
        answers = [{"role": TARGET_ROLE, "content": text}]
    else:
        answers = read(record, name)
    if isinstance(given, list):
        return read(record, prompts[0]) + answers
    # A list of messages has the prompt at its beginning, unless an answer is there.
    if answers and answers[0]["role"] != TARGET_ROLE:
        return answers
    return [{"role": "user", "content": _join_prompt(record, prompts)}, *answers]


def _build_side(
    messages: list[dict[str, Any]], config: InputConfig, tools: Any, consumed_bytes: int, first: int
) -> Document:
    """Makes a record of one side of a preference; turns before number `first` have no loss."""
    if is_jinja(config.template):
        return _render(messages, config, tools, consumed_bytes, first)
    turns = [(message["role"], message["content"]) for message in messages]
    return _write(turns, config, consumed_bytes, first)


def _plain_messages(record: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in _turns(record, name)]


def _render(
    messages: list[dict[str, Any]],
    config: InputConfig,
    tools: Any,
    consumed_bytes: int,
    first: int = 0,
) -> Document:
    """Makes a document of a conversation by the chat template. Raises: RecordError."""
    assert isinstance(config.template, dict), "prepare resolves it"
    answers = [message for message in messages[first:] if message["role"] == TARGET_ROLE]
    if not any(str(one.get("content") or "").strip() or one.get("tool_calls") for one in answers):
        # Without the template's text, by which filters count it among those that have no answer.
        bare = tuple((str(one.get("content") or ""), one in answers) for one in messages)
        text = "".join(part for part, _ in bare)
        return Document(text, encode(text), consumed_bytes, segments=bare)
    try:
        parts = load_chat_template(config.template).segments(messages, tools or None, first)
    except ChatTemplateError as error:
        fix = "correct the record, or mark the assistant's turns in a copy of the template by {% generation %}"
        raise RecordError(str(error), fix) from None
    text = "".join(part.text for part in parts)
    segments = tuple((part.text, part.is_learned) for part in parts)
    spelled = frozenset(number for number, part in enumerate(parts) if part.is_spelled)
    return Document(text, encode(text), consumed_bytes, segments=segments, spelled=spelled)


def _messages(record: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Returns the messages for a chat template, with all their fields. Raises: RecordError."""
    found = []
    for number, message in enumerate(_message_list(record, name)):
        message = _unaliased(message, f"{name}[{number}]")
        if not isinstance(message.get("role"), str):
            what = f"{name}[{number}].role {describe(message, 'role', 'a string')}"
            raise RecordError(what, _MESSAGE_FIX)
        found.append({**message, "role": _ROLES_OF.get(message["role"], message["role"])})
    return found


def _message_list(record: Mapping[str, Any], name: str) -> list[Any]:
    messages = record.get(name)
    if not isinstance(messages, list):
        error = bad_field(record, name, "a list", "messages_field")
        if name not in record and {"prompt", _INSTRUCTION} & record.keys():
            error.fix = "leave messages_field out (inputs.0.messages_field=null): prompts with answers need none"
        raise error
    return messages


def _unaliased(message: Any, place: str) -> Mapping[str, Any]:
    """Returns a message with our keys, where it has those of ShareGPT. Raises: RecordError."""
    if not isinstance(message, dict):
        raise RecordError(f"{place} is {kind_of(message)}, not an object", _MESSAGE_FIX)
    if "role" not in message and "from" in message:
        return {key: message[alias] for key, alias in _ALIASES.items() if alias in message}
    return message


def prompt_fields(config: InputConfig, known: Collection[str]) -> tuple[list[str], str]:
    """Returns the fields of prompt and response; those of Alpaca where records have only these."""
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


def _turns(record: Mapping[str, Any], name: str) -> list[tuple[str, str]]:
    """Returns the (role, text) of each message."""
    turns = []
    for number, message in enumerate(_message_list(record, name)):
        place = f"{name}[{number}]"
        message = _unaliased(message, place)
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise RecordError(f"{place}.{key} {describe(message, key, 'a string')}", _MESSAGE_FIX)
        role = _ROLES_OF.get(message["role"], message["role"])
        if role not in ROLES:
            known = f"use one of {', '.join([*ROLES, *_ROLES_OF])}"
            raise RecordError(f"{place}.role is {role!r}, which is not known", known)
        encode(message["content"])
        turns.append((role, message["content"]))
    return turns


def apply_template(turns: list[tuple[str, str]], template: Template, first: int = 0) -> tuple[Segments, frozenset[int]]:
    """Writes a template around the turns; returns the segments, and which are the template's.

    The assistant's turns are learned, from number `first` on. Raises: RecordError.
    """
    texts = turns_of(template)
    segments: list[tuple[str, bool]] = []
    markers: set[int] = set()
    for number, (role, text) in enumerate(turns):
        if role not in texts:
            known = ", ".join(texts)
            raise RecordError(f"role {role!r} is not in the template", f"add it to {known}")
        before, after = texts[role]
        is_learned = role == TARGET_ROLE and number >= first
        if before:
            markers.add(len(segments))
            segments.append((before, False))
        if text:
            segments.append((text, is_learned))
        if after:
            markers.add(len(segments))
            segments.append((after, is_learned))
    return tuple(segments), frozenset(markers)
