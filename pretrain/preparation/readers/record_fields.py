"""Fields of a record of JSON or Parquet, by name; the caller gives errors their place."""

from collections.abc import Collection, Mapping
from typing import Any

from pretrain.preparation.filters import BAD_FIELD, BAD_RECORD, NOT_JSON, SURROGATE, BadInputError
from pretrain.utils.safe_read import parse_json, parse_json_at

JSON_KINDS = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    bytes: "bytes",
}

BEYOND = "JSON beyond a limit"
ABSENT = object()

OR_SKIP = "or leave such records out (--on-error skip, or on_error of the input)"


def spelled(option: str) -> str:
    """Returns the ways to give an option that names a field."""
    return "--text-field, or text_field in a config" if option == "text_field" else f"{option} in a config"


class RecordError(Exception):
    """A malformed record, whose place the caller knows."""

    def __init__(self, what: str, fix: str, reason: str = BAD_RECORD) -> None:
        self.what = what
        self.fix = fix
        self.reason = reason
        super().__init__(what)

    def at(self, where: str) -> BadInputError:
        """Returns the error with its place."""
        return BadInputError(self.what, where=where, fix=self.fix, reason=self.reason)


def parse_object(text: str) -> dict[str, Any]:
    """Parses a record of JSON. Raises: RecordError."""
    try:
        # `parse_json` spends half of its time on white space around the record.
        row, end = parse_json_at(text, 0) if text.startswith("{") else (None, 0)
        if end == 0 or text[end:] not in ("", "\n"):
            row = parse_json(text)
    except ValueError as error:
        if type(error) is ValueError:  # of `safe_read`, which is no error of JSON
            raise RecordError(f"{BEYOND}: {error}", f"change it, {OR_SKIP}", NOT_JSON) from None
        is_joined = "\ufeff" in text
        fix = "write one JSON object a line"
        fix += "; a byte-order mark is in it: end each file with a line end before joining" * is_joined
        raise RecordError(f"not JSON: {error}", fix, NOT_JSON) from None
    if not isinstance(row, dict):
        raise RecordError("not a JSON object", 'write records such as {"text": "..."}', NOT_JSON)
    return row


def head_of(known: Collection[str], name: str) -> str | None:
    """Returns the known field that `name` is, or is in: `doc.text`, else `doc`; None: neither."""
    while name not in known:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return name


def find_field(value: Any, name: str) -> Any:
    """Returns the value at a path in records and lists, such as `doc.parts.0`, or `ABSENT`."""
    if isinstance(value, list):
        index, dot, rest = name.partition(".")
        if not (index.isascii() and index.isdecimal() and int(index) < len(value)):
            return ABSENT
        return find_field(value[int(index)], rest) if dot else value[int(index)]
    head = head_of(value, name) if isinstance(value, dict) else None
    if head is None:
        return ABSENT
    return value[head] if head == name else find_field(value[head], name[len(head) + 1 :])


def text_of(record: Mapping[str, Any], name: str, option: str) -> tuple[str, bytes]:
    """Returns the string under `name`, and it in UTF-8. Raises: RecordError."""
    text = record.get(name)
    if not isinstance(text, str):
        raise bad_field(record, name, "a string", option)
    return text, encode(text)


def encode(text: str) -> bytes:
    """Returns text in UTF-8; JSON may spell surrogates, which UTF-8 does not have."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        surrogate = f"{error.object[error.start]!a}"
        raise RecordError(
            f"unpaired surrogate {surrogate} in the text",
            f"remove it, {OR_SKIP}",
            SURROGATE,
        ) from None


def bad_field(record: Mapping[str, Any], name: str, wanted: str, option: str) -> RecordError:
    """Builds the error of a field that is absent, or not `wanted`; `option` chooses another."""
    fields = ", ".join(sorted(map(str, record))[:20]) or "none"
    text = f"field {name!r} {describe(record, name, wanted)}; fields: {fields}"
    if name in record:
        fix = f"make it {wanted}, or choose another with {option}"
        if wanted == "a string" and isinstance(record[name], list):
            fix += ", or join its strings: joiner of the input"
        return RecordError(text, fix, BAD_FIELD)
    chats = [key for key, value in record.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if chats and option in ("prompt_field", "messages_field"):
        return RecordError(
            text,
            f"give messages_field: {chats[0]} (inputs.0.messages_field={chats[0]})",
            BAD_FIELD,
        )
    return RecordError(text, f"add it to the record, or choose one with {option}", BAD_FIELD)


def describe(record: Mapping[str, Any], name: str, wanted: str) -> str:
    """Returns how a field is not `wanted`."""
    return f"is {kind_of(record[name])}, not {wanted}" if name in record else "is absent"


def kind_of(value: object) -> str:
    """Returns the JSON name of a value's type."""
    return JSON_KINDS.get(type(value), "an object")
