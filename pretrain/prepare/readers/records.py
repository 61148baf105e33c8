"""A record, as JSON or Parquet give it -> a document, by the kind of data.

    text       {"text": "..."}
    pairs      {"source": "...", "target": "..."}
    records    {"prompt": "...", "response": "..."}: the response is in the loss
               {"messages": [{"role": "user", "content": "..."}, ...]}: what the assistant says is in the loss
    classes    {"text": "...", "label": "..."}: a label is text, a whole number, or true or false
    tags       {"tokens": ["...", ...], "tags": ["...", ...]}: as many labels as words

Which fields these are is the input's to say. Not here: where the record was, which the caller adds to RecordError.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from pretrain.config.prepare import DataKind, turns_of
from pretrain.prepare.filters import Document, Label
from pretrain.prepare.readers.rule import ReadRule

TARGET_ROLE = "assistant"
ROLES = ("system", "developer", "user", "tool", "function", TARGET_ROLE)

Segments = tuple[tuple[str, bool], ...]
"""(text, loss mask) of each part of a record."""

_JSON = json.JSONDecoder()

Build = Callable[[Mapping[str, Any], ReadRule, int], Document]
"""Makes a document of a record that took so many bytes of the input. Raises: RecordError."""


class RecordError(Exception):
    """A malformed record; the caller, which knows its place, raises a DataError."""

    def __init__(self, what: str, fix: str) -> None:
        self.what = what
        self.fix = fix
        super().__init__(what)


def _decode(text: str) -> Any:
    """As `JSONDecoder.decode`, half of whose time goes to white space around the record. Raises: as it does."""
    if text.startswith("{"):
        row, end = _JSON.raw_decode(text)
        if text[end:] in ("", "\n"):
            return row
    return _JSON.decode(text)


def parse_object(text: str) -> dict[str, Any]:
    """Parses a record of JSON. Raises: RecordError."""
    try:
        row = _decode(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not JSON: {error}", "write one JSON object a line") from None
    return check_object(row)


def check_object(value: Any) -> dict[str, Any]:
    """Returns `value` if it is a JSON object. Raises: RecordError."""
    if not isinstance(value, dict):
        raise RecordError("not a JSON object", 'write records such as {"text": "..."}')
    return value


def _build_text(record: Mapping[str, Any], rule: ReadRule, consumed_bytes: int) -> Document:
    text, utf8 = _text(record, rule.config.text_field, "--text-field, or text_field in a config")
    return Document(text, utf8, consumed_bytes, fields=_fields(record, rule))


def _build_pair(record: Mapping[str, Any], rule: ReadRule, consumed_bytes: int) -> Document:
    source, _ = _text(record, rule.config.source_field, "source_field")
    target, utf8 = _text(record, rule.config.target_field, "target_field")
    return Document(target, utf8, consumed_bytes, source=source, fields=_fields(record, rule))


def _build_record(record: Mapping[str, Any], rule: ReadRule, consumed_bytes: int) -> Document:
    config = rule.config
    if config.messages_field is not None:
        segments = _segments(record, config.messages_field)
        roles = [message["role"] for message in record[config.messages_field]]
    else:
        prompt, _ = _text(record, config.prompt_field, "prompt_field, or give messages_field")
        response, _ = _text(record, config.response_field, "response_field")
        segments = ((prompt, False), (response, True))
        roles = ["user", TARGET_ROLE]
    markers = frozenset[int]()
    if config.template is not None:
        segments, markers = _dress(segments, roles, config.template)
    text = "".join(part for part, _ in segments)
    return Document(
        text, text.encode(), consumed_bytes, segments=segments, markers=markers, fields=_fields(record, rule)
    )


def _dress(segments: Segments, roles: list[str], template: str | dict[str, str]) -> tuple[Segments, frozenset[int]]:
    """Writes a template around the turns; returns the segments, and which of them it wrote."""
    turns, dressed, markers = turns_of(template), list[tuple[str, bool]](), set[int]()
    for (text, is_learned), role in zip(segments, roles, strict=True):
        if role not in turns:
            raise RecordError(f"role {role!r} is not in the template", f"add it beside {', '.join(turns)}")
        before, after = turns[role]
        for part, in_loss, is_marker in ((before, False, True), (text, is_learned, False), (after, is_learned, True)):
            if part:
                markers |= {len(dressed)} if is_marker else set()
                dressed.append((part, in_loss))
    return tuple(dressed), frozenset(markers)


def _build_class(record: Mapping[str, Any], rule: ReadRule, consumed_bytes: int) -> Document:
    document = _build_text(record, rule, consumed_bytes)
    name = rule.config.label_field
    if name not in record:
        raise _bad_field(record, name, "a label", "label_field")
    document.labels = (Label(_label(record[name], f"field {name!r}"), 0, len(document.text)),)
    return document


def _build_tags(record: Mapping[str, Any], rule: ReadRule, consumed_bytes: int) -> Document:
    words_field, tags_field = rule.config.words_field, rule.config.tags_field
    for name, option in ((words_field, "words_field"), (tags_field, "tags_field")):
        if not isinstance(record.get(name), list):
            raise _bad_field(record, name, "a list", option)
    words, tags = record[words_field], record[tags_field]
    if len(words) != len(tags):
        raise RecordError(
            f"field {words_field!r} has {len(words)} words and {tags_field!r} {len(tags)} tags",
            "give each word one tag",
        )
    labels, end = [], -1
    for number, (word, tag) in enumerate(zip(words, tags, strict=True)):
        if not isinstance(word, str) or not word.strip():
            found = "blank" if isinstance(word, str) else f"{kind_of(word)}, not a string"
            raise RecordError(f"{words_field}[{number}] is {found}", "give words with characters in them")
        start, end = end + 1, end + 1 + len(word)
        labels.append(Label(_label(tag, f"{tags_field}[{number}]"), start, end))
    text = " ".join(words)
    try:
        utf8 = text.encode()
    except UnicodeEncodeError as error:
        raise _unpaired(error) from None
    return Document(text, utf8, consumed_bytes, labels=tuple(labels), fields=_fields(record, rule))


def _label(value: object, place: str) -> str | int:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int) and value != "":
        return value
    found = "empty" if value == "" else f"{kind_of(value)}, not a string or a whole number"
    raise RecordError(f"{place} is {found}", "give each label a name or a whole number")


BUILDERS: dict[DataKind, Build] = {
    "text": _build_text,
    "pairs": _build_pair,
    "records": _build_record,
    "classes": _build_class,
    "tags": _build_tags,
}


def _fields(record: Mapping[str, Any], rule: ReadRule) -> dict[str, Any]:
    return {name: record[name] for name in rule.fields if name in record} if rule.fields else {}


def _text(record: Mapping[str, Any], name: str, option: str) -> tuple[str, bytes]:
    """Returns the string under `name`, and it in UTF-8."""
    text = record.get(name)
    if not isinstance(text, str):
        raise _bad_field(record, name, "a string", option)
    try:
        return text, text.encode()
    except UnicodeEncodeError as error:
        raise _unpaired(error) from None


def _segments(record: Mapping[str, Any], name: str) -> tuple[tuple[str, bool], ...]:
    messages = record.get(name)
    if not isinstance(messages, list):
        raise _bad_field(record, name, "a list", "messages_field")
    return tuple(_segment(message, f"{name}[{number}]") for number, message in enumerate(messages))


def _segment(message: Any, place: str) -> tuple[str, bool]:
    fix = 'write {"role": "user", "content": "..."}'
    if not isinstance(message, dict):
        raise RecordError(f"{place} is {kind_of(message)}, not an object", fix)
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            found = f"is {kind_of(message[key])}, not a string" if key in message else "is absent"
            raise RecordError(f"{place}.{key} {found}", fix)
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise RecordError(f"{place}.role is {role!r}, which is not known", f"use one of {', '.join(ROLES)}")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise _unpaired(error) from None
    return content, role == TARGET_ROLE


def _unpaired(error: UnicodeEncodeError) -> RecordError:
    return RecordError(f"unpaired surrogate {error.object[error.start]!a} in the text", "remove it")


def _bad_field(record: Mapping[str, Any], name: str, wanted: str, option: str) -> RecordError:
    found = f"is {kind_of(record[name])}, not {wanted}" if name in record else "is absent"
    fields = ", ".join(sorted(map(str, record))[:20]) or "none"
    return RecordError(f"field {name!r} {found}; fields: {fields}", f"choose one with {option}")


def kind_of(value: object) -> str:
    """The JSON name of a value's type."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    names |= {list: "a list", bytes: "bytes"}
    return names.get(type(value), "an object")
