"""`jsonl`: a line is a record; blank lines are passed over."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from pretrain.errors import DataError
from pretrain.prepare.filters import Document
from pretrain.prepare.input_parts import Slice
from pretrain.prepare.inputs.opening import InputStream
from pretrain.prepare.readers.lines import UTF8_BOM, Lines
from pretrain.prepare.readers.records import BUILDERS, RecordError, check_object, parse_object
from pretrain.prepare.readers.rule import ReadRule, decode, not_utf8, too_long


def read_jsonl(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the documents of a slice. Memory: a line."""
    return read_records(Lines.of_slice(stream, piece, rule.limit), stream.file.shown, rule)


def read_records(lines: Lines, name: str, rule: ReadRule) -> Iterator[Document]:
    """Yields the document of each line; `name` is what the file is called in errors. Raises: DataError."""
    build = BUILDERS[rule.kind]
    for line in lines:
        start = lines.offset
        if start == 0 and line.startswith(UTF8_BOM):
            line, start = line[len(UTF8_BOM) :], len(UTF8_BOM)
        if not line or line.isspace():
            continue
        text = decode(line, name, start)
        try:
            document = build(parse_object(text), rule, lines.consumed_bytes)
        except RecordError as error:
            raise DataError(error.what, where=lines.place(), fix=error.fix) from None
        yield document


# `json`: one list of records, or one record, read a record at a time.
#
# The file is decoded in chunks; a record is parsed as soon as it is complete. What is not complete
# is tried again with twice as much text, so that a record is parsed a few times at most, and one
# that is too long is refused by the limit.


CHUNK_BYTES = 2**20

_TOKEN_CHARS = 16

"""More than the longest token that may be cut at the end of what was read, a string excepted."""

_SPACE = re.compile(r"[ \t\n\r]*")

_parse = json.JSONDecoder().raw_decode


def read_json(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the documents of a file. Memory: a record, of at most the limit, and a chunk.

    Raises:
        DataError: Malformed input.
    """
    text = _JsonText(stream, rule.limit)
    build = BUILDERS[rule.kind]
    before = 0
    for line, record in _records(text):
        position = stream.stored.tell()
        try:
            document = build(check_object(record), rule, position - before)
        except RecordError as error:
            raise DataError(error.what, where=f"{stream.file.shown}:{line}", fix=error.fix) from None
        before = position
        yield document


def _records(text: "_JsonText") -> Iterator[tuple[int, Any]]:
    """Yields the values of the list, or the one object, each with the line that it begins at."""
    if text.peek() != "[":
        yield text.take_object()
        if text.peek():
            raise text.error("text after the record", "give one list; if each line is a record, say format: jsonl")
        return
    text.skip()
    separator = "," if text.peek() != "]" else "]"
    while separator == ",":
        yield text.take_object()
        separator = text.peek()
        if separator not in (",", "]"):
            raise text.error("not JSON: ',' or ']' is missing", "separate records by commas and end the list")
        if separator == ",":
            text.skip()
    text.skip()
    if text.peek():
        raise text.error("text after the list", "give one list")


class _JsonText:
    """The text of a file from a position on, as much of it as is needed."""

    def __init__(self, stream: InputStream, limit: int) -> None:
        self._plain = stream.plain
        self._name = stream.file.shown
        self._limit = limit
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._num_bytes = 0  # read so far
        self._text = ""
        self._at = 0  # in _text
        self._line = 1  # of _at
        self._is_complete = False

    def error(self, what: str, fix: str) -> DataError:
        """Builds the error of what comes next."""
        return DataError(what, where=f"{self._name}:{self._line}", fix=fix)

    def peek(self) -> str:
        """Passes over white space; returns the character after it, or the empty string at the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._advance(match.end())
            if self._at < len(self._text):
                return self._text[self._at]
            if self._is_complete:
                return ""
            self._read(CHUNK_BYTES)

    def skip(self) -> None:
        """Passes over the character that `peek` gave."""
        self._at += 1

    def take_object(self) -> tuple[int, Any]:
        """Parses the object that comes next and passes over it; returns the line that it begins at, and the object.

        Raises:
            DataError: It is not an object, not JSON, or too long.
        """
        if self.peek() != "{":
            # Other values might be cut short and still be JSON, as numbers are; no object is.
            what = "not a JSON object" if self.peek() else "not JSON: the file ends early"
            raise self.error(what, 'write a list of records such as {"text": "..."}')
        line = self._line
        while True:
            try:
                value, end = _parse(self._text, self._at)
            except json.JSONDecodeError as error:
                self._check_unfinished(error)
            except (ValueError, RecursionError) as error:
                raise self.error(f"not JSON: {error}", "correct the record that begins there") from None
            else:
                self._check_length(end)
                self._advance(end)
                return line, value
            self._check_length(len(self._text))
            self._read(max(CHUNK_BYTES, len(self._text) - self._at))

    def _check_length(self, end: int) -> None:
        if end - self._at > self._limit:
            raise too_long("a record", self._limit, f"{self._name}:{self._line}")

    def _check_unfinished(self, error: json.JSONDecodeError) -> None:
        """Raises the error of an object that no further text can complete."""
        may_go_on = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _TOKEN_CHARS
        if self._is_complete or not may_go_on:
            line = self._line + self._text.count("\n", self._at, error.pos)
            raise DataError(f"not JSON: {error.msg}", where=f"{self._name}:{line}", fix="correct it there") from None

    def _advance(self, to: int) -> None:
        self._line += self._text.count("\n", self._at, to)
        self._at = to

    def _read(self, num_bytes: int) -> None:
        """Appends the text of at most `num_bytes` more, and forgets what was passed over."""
        data = self._plain.read(num_bytes)
        self._is_complete = not data
        start = self._num_bytes - len(self._decoder.getstate()[0])
        self._num_bytes += len(data)
        if start == 0 and data.startswith(UTF8_BOM):
            data, start = data[len(UTF8_BOM) :], len(UTF8_BOM)
        try:
            more = self._decoder.decode(data, final=self._is_complete)
        except UnicodeDecodeError as error:
            raise not_utf8(error, self._name, start) from None
        self._text, self._at = self._text[self._at :] + more, 0
