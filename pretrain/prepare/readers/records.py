"""The rule by which an input is read, and its records: JSON or a row of Parquet -> a document.

    text       {"text": "..."}
    pairs      {"source": "...", "target": "..."}
    records    {"prompt": "...", "response": "..."}: the response is in the loss
               {"instruction": "...", "input": "...", "output": "..."} (Alpaca): the output is
               {"messages": [{"role": "user", "content": "..."}, ...]}: the turns of the assistant
               are in the loss; of ShareGPT, `from`, `value`, "human" and "gpt" are read alike;
               a chat template gets the messages as they are, and the `tools` of the record
    classes    {"text": "...", "label": "..."}: a label is text, a whole number, or true or false
    tags       {"tokens": ["...", ...], "tags": ["...", ...]}: as many labels as words

The names of the fields are options of the input. The caller adds the place to a RecordError.
"""

import json
from codecs import BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_LE
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pretrain.config.prepare import DataKind, InputConfig, Template, is_jinja, turns_of
from pretrain.errors import DataError
from pretrain.prepare.filters import Document, Label
from pretrain.tokenizer import ASSISTANT as TARGET_ROLE
from pretrain.tokenizer import ChatTemplateError, load_chat_template

ROLES = ("system", "developer", "user", "tool", "function", TARGET_ROLE)
JSON_KINDS = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    bytes: "bytes",
}

FIELD_OPTIONS: dict[DataKind, tuple[str, str] | tuple[str]] = {
    "text": ("text_field",),
    "pairs": ("source_field", "target_field"),
    "records": ("messages_field",),
    "classes": ("text_field", "label_field"),
    "tags": ("words_field", "tags_field"),
}

# Keys and roles of ShareGPT's messages.
_ALIASES = {"role": "from", "content": "value"}
_ROLES_OF = {"human": "user", "gpt": TARGET_ROLE}
_MESSAGE_FIX = 'write {"role": "user", "content": "..."}'

# Fields of Alpaca's records (Taori et al. 2023).
_INSTRUCTION = "instruction"
_INPUT = "input"
_OUTPUT = "output"

# (text, loss mask) of each part of a record.
Segments = tuple[tuple[str, bool], ...]

_JSON = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ReadRule:
    """Options of a reader for one input."""

    config: InputConfig
    kind: DataKind = "text"
    fields: tuple[str, ...] = ()  # of records, for filters
    skip_undecodable: bool = False  # instead of failing; default corpus only

    @property
    def limit(self) -> int:
        """Bytes that a document, and a line, may have."""
        return self.config.max_document_bytes

    def text_fields(self, known: Collection[str]) -> tuple[dict[str, str], list[str]]:
        """Returns the fields that documents are made of: needed ones, by their option, and those that may be absent.

        `known` are the fields of the records.
        """
        if self.kind == "records" and not self.config.messages_field:
            (first, *others), response = _prompt_fields(self.config, known)
            needed = {"prompt_field": first, "response_field": response}
            return needed, [*others, *([_INPUT] if first == _INSTRUCTION else [])]
        return {option: getattr(self.config, option) for option in FIELD_OPTIONS[self.kind]}, []

    def build(self, record: Mapping[str, Any], consumed_bytes: int) -> Document:
        """Makes a document of a record of `consumed_bytes` of the input. Raises: RecordError."""
        document = _BUILDERS[self.kind](record, self.config, consumed_bytes)
        document.fields = self.select_fields(record)
        return document

    def select_fields(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields that filters ask for."""
        return {name: record[name] for name in self.fields if name in record}


def spelled(option: str) -> str:
    """Returns the ways to give an option that names a field."""
    return "--text-field, or text_field in a config" if option == "text_field" else f"{option} in a config"


def too_long(what: str, limit: int, where: str) -> DataError:
    """Builds the error of a line or document that is longer than the limit."""
    option = "--max-document-bytes, or max_document_bytes of the input"
    return DataError(
        f"{what} is longer than max_document_bytes={limit}",
        where=where,
        fix=f"raise it ({option}), which costs memory, or cut the text",
    )


def decode(utf8: bytes, name: str, offset: int) -> str:
    """Decodes text at byte `offset` of `name`. Raises: DataError, with the wrong byte."""
    try:
        return utf8.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(error, name, offset) from None


def not_utf8(error: UnicodeDecodeError, name: str, offset: int) -> DataError:
    """Builds the error of bytes, from byte `offset` of `name` on, that are not UTF-8."""
    what = f"invalid UTF-8: byte 0x{error.object[error.start]:02x} ({error.reason})"
    fix = "convert the file to UTF-8 (iconv -f ENCODING), or drop such bytes (iconv -c -f UTF-8 -t UTF-8)"
    if offset == 0 and error.object.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):  # of UTF-32 too, little-endian
        encoding = "UTF-32" if error.object.startswith(BOM_UTF32_LE) else "UTF-16"
        what = f"{encoding} by its byte-order mark, not UTF-8"
        fix = f"convert it: iconv -f {encoding} -t UTF-8 FILE > NEW_FILE"
    return DataError(what, where=f"{name}, byte {offset + error.start}", fix=fix)


class RecordError(Exception):
    """A malformed record, whose place the caller knows."""

    def __init__(self, what: str, fix: str) -> None:
        self.what = what
        self.fix = fix
        super().__init__(what)

    def at(self, where: str) -> DataError:
        """Returns the error with its place."""
        return DataError(self.what, where=where, fix=self.fix)


def parse_object(text: str) -> dict[str, Any]:
    """Parses a record of JSON. Raises: RecordError."""
    try:
        # `JSONDecoder.decode` spends half of its time on white space around the record.
        row, end = _JSON.raw_decode(text) if text.startswith("{") else (None, 0)
        if end == 0 or text[end:] not in ("", "\n"):
            row = _JSON.decode(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not JSON: {error}", "write one JSON object a line") from None
    if not isinstance(row, dict):
        raise RecordError("not a JSON object", 'write records such as {"text": "..."}')
    return row


def _build_text(record: Mapping[str, Any], config: InputConfig, consumed_bytes: int) -> Document:
    text, utf8 = text_of(record, config.text_field, spelled("text_field"))
    return Document(text, utf8, consumed_bytes)


def _build_pair(record: Mapping[str, Any], config: InputConfig, consumed_bytes: int) -> Document:
    source, _ = text_of(record, config.source_field, "source_field")
    target, utf8 = text_of(record, config.target_field, "target_field")
    return Document(target, utf8, consumed_bytes, source=source)


def _build_record(record: Mapping[str, Any], config: InputConfig, consumed_bytes: int) -> Document:
    if config.messages_field is not None and is_jinja(config.template):
        messages = _messages(record, config.messages_field)
        return _render(messages, config, record.get("tools"), consumed_bytes)
    if config.messages_field is not None:
        turns = _turns(record, config.messages_field)
    else:
        names, response_field = _prompt_fields(config, record)
        prompt = _join_prompt(record, names)
        if config.prompt_field == _INSTRUCTION and record.get(_INPUT):
            fix = f"use prompt_field=[{_INSTRUCTION}, {_INPUT}], or [{_INSTRUCTION}] to leave it out"
            raise RecordError(f"field {_INPUT!r} belongs to the instruction, and prompt_field does not name it", fix)
        response, _ = text_of(record, response_field, "response_field")
        turns = [("user", prompt), (TARGET_ROLE, response)]
    if is_jinja(config.template):
        messages = [{"role": role, "content": text} for role, text in turns]
        return _render(messages, config, None, consumed_bytes)
    segments: Segments = tuple((text, role == TARGET_ROLE) for role, text in turns)
    markers = frozenset[int]()
    if config.template is not None and any(is_learned for _, is_learned in segments):  # others are left out
        segments, markers = apply_template(turns, config.template)
    text = "".join(part for part, _ in segments)
    return Document(text, text.encode(), consumed_bytes, segments=segments, markers=markers)


def _render(messages: list[dict[str, Any]], config: InputConfig, tools: Any, consumed_bytes: int) -> Document:
    """Makes a document of a conversation by the chat template. Raises: RecordError."""
    assert isinstance(config.template, dict), "prepare resolves it"
    answers = [message for message in messages if message["role"] == TARGET_ROLE]
    if not any(str(one.get("content") or "").strip() or one.get("tool_calls") for one in answers):
        # Without the template's text, by which filters count it among those that have no answer.
        bare = tuple((str(one.get("content") or ""), one["role"] == TARGET_ROLE) for one in messages)
        text = "".join(part for part, _ in bare)
        return Document(text, _encode(text), consumed_bytes, segments=bare)
    try:
        parts = load_chat_template(config.template).segments(messages, tools or None)
    except ChatTemplateError as error:
        fix = "correct the record, or mark the assistant's turns in a copy of the template by {% generation %}"
        raise RecordError(str(error), fix) from None
    text = "".join(part.text for part in parts)
    segments = tuple((part.text, part.is_learned) for part in parts)
    spelled = frozenset(number for number, part in enumerate(parts) if part.is_spelled)
    return Document(text, _encode(text), consumed_bytes, segments=segments, spelled=spelled)


def _messages(record: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Returns the messages for a chat template, which knows what they may have. Raises: RecordError."""
    found = []
    for number, message in enumerate(_message_list(record, name)):
        message = _unaliased(message, f"{name}[{number}]")
        if not isinstance(message.get("role"), str):
            what = f"{name}[{number}].role {_describe(message, 'role', 'a string')}"
            raise RecordError(what, _MESSAGE_FIX)
        found.append({**message, "role": _ROLES_OF.get(message["role"], message["role"])})
    return found


def _message_list(record: Mapping[str, Any], name: str) -> list[Any]:
    messages = record.get(name)
    if not isinstance(messages, list):
        error = _bad_field(record, name, "a list", "messages_field")
        if name not in record and {"prompt", _INSTRUCTION} & record.keys():
            error.fix = "leave messages_field out (inputs.0.messages_field=null): prompts with answers need none"
        raise error
    return messages


def _unaliased(message: Any, place: str) -> Mapping[str, Any]:
    """Returns a message with the keys of ours, where it has those of ShareGPT. Raises: RecordError."""
    if not isinstance(message, dict):
        raise RecordError(f"{place} is {_kind_of(message)}, not an object", _MESSAGE_FIX)
    if "role" not in message and "from" in message:
        return {key: message[alias] for key, alias in _ALIASES.items() if alias in message}
    return message


def _prompt_fields(config: InputConfig, known: Collection[str]) -> tuple[list[str], str]:
    """Returns the fields of prompt and response; those of Alpaca where records have these, and not ours."""
    is_default = (config.prompt_field, config.response_field) == ("prompt", "response")
    if is_default and _INSTRUCTION in known and not {"prompt", "response"} & {*known}:
        return [_INSTRUCTION, _INPUT], _OUTPUT
    names = [config.prompt_field] if isinstance(config.prompt_field, str) else config.prompt_field
    return names, config.response_field


def _join_prompt(record: Mapping[str, Any], names: list[str]) -> str:
    """Returns the fields of a prompt, the first and those of the others that are there, with blank lines between."""
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
                raise RecordError(f"{place}.{key} {_describe(message, key, 'a string')}", _MESSAGE_FIX)
        role = _ROLES_OF.get(message["role"], message["role"])
        if role not in ROLES:
            known = f"use one of {', '.join([*ROLES, *_ROLES_OF])}"
            raise RecordError(f"{place}.role is {role!r}, which is not known", known)
        _encode(message["content"])
        turns.append((role, message["content"]))
    return turns


def apply_template(turns: list[tuple[str, str]], template: Template) -> tuple[Segments, frozenset[int]]:
    """Writes a template around the turns; returns the segments, and which are the template's. Raises: RecordError."""
    texts = turns_of(template)
    segments: list[tuple[str, bool]] = []
    markers: set[int] = set()
    for role, text in turns:
        if role not in texts:
            known = ", ".join(texts)
            raise RecordError(f"role {role!r} is not in the template", f"add it to {known}")
        before, after = texts[role]
        is_learned = role == TARGET_ROLE
        if before:
            markers.add(len(segments))
            segments.append((before, False))
        if text:
            segments.append((text, is_learned))
        if after:
            markers.add(len(segments))
            segments.append((after, is_learned))
    return tuple(segments), frozenset(markers)


def _build_class(record: Mapping[str, Any], config: InputConfig, consumed_bytes: int) -> Document:
    document = _build_text(record, config, consumed_bytes)
    name = config.label_field
    if name not in record:
        raise _bad_field(record, name, "a label", "label_field")
    label = _label(record[name], f"field {name!r}")
    document.labels = (Label(label, 0, len(document.text)),)
    return document


def _build_tags(record: Mapping[str, Any], config: InputConfig, consumed_bytes: int) -> Document:
    words_field = config.words_field
    tags_field = config.tags_field
    for name, option in ((words_field, "words_field"), (tags_field, "tags_field")):
        if not isinstance(record.get(name), list):
            raise _bad_field(record, name, "a list", option)
    words = record[words_field]
    tags = record[tags_field]
    if len(words) != len(tags):
        counts = f"{len(words)} words and {tags_field!r} {len(tags)} tags"
        raise RecordError(f"field {words_field!r} has {counts}", "give each word one tag")
    labels = []
    end = -1
    for number, (word, tag) in enumerate(zip(words, tags, strict=True)):
        if not isinstance(word, str) or not word.strip():
            found = "blank" if isinstance(word, str) else f"{_kind_of(word)}, not a string"
            fix = "give words with characters in them"
            raise RecordError(f"{words_field}[{number}] is {found}", fix)
        start = end + 1
        end = start + len(word)
        labels.append(Label(_label(tag, f"{tags_field}[{number}]"), start, end))
    text = " ".join(words)
    return Document(text, _encode(text), consumed_bytes, labels=tuple(labels))


_BUILDERS: dict[DataKind, Callable[[Mapping[str, Any], InputConfig, int], Document]] = {
    "text": _build_text,
    "pairs": _build_pair,
    "records": _build_record,
    "classes": _build_class,
    "tags": _build_tags,
}


def _label(value: object, place: str) -> str | int:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int) and value != "":
        return value
    found = "empty" if value == "" else f"{_kind_of(value)}, not a string or a whole number"
    raise RecordError(f"{place} is {found}", "give each label a name or a whole number")


def text_of(record: Mapping[str, Any], name: str, option: str) -> tuple[str, bytes]:
    """Returns the string under `name`, and it in UTF-8. Raises: RecordError."""
    text = record.get(name)
    if not isinstance(text, str):
        raise _bad_field(record, name, "a string", option)
    return text, _encode(text)


def _encode(text: str) -> bytes:
    """Returns text in UTF-8; JSON may spell surrogates, which UTF-8 does not have."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        surrogate = f"{error.object[error.start]!a}"
        raise RecordError(f"unpaired surrogate {surrogate} in the text", "remove it") from None


def _bad_field(record: Mapping[str, Any], name: str, wanted: str, option: str) -> RecordError:
    fields = ", ".join(sorted(map(str, record))[:20]) or "none"
    what = f"field {name!r} {_describe(record, name, wanted)}; fields: {fields}"
    if name in record:
        return RecordError(what, f"make it {wanted}, or choose another with {option}")
    chats = [key for key, value in record.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if chats and option in ("prompt_field", "messages_field"):
        return RecordError(what, f"give messages_field: {chats[0]} (inputs.0.messages_field={chats[0]})")
    return RecordError(what, f"add it to the record, or choose one with {option}")


def _describe(record: Mapping[str, Any], name: str, wanted: str) -> str:
    return f"is {_kind_of(record[name])}, not {wanted}" if name in record else "is absent"


def _kind_of(value: object) -> str:
    """Returns the JSON name of a value's type."""
    return JSON_KINDS.get(type(value), "an object")
