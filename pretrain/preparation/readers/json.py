"""Readers of JSON.

    jsonl    a line is a record; blank lines are skipped
    json     one list of records, or records one after the other, parsed a record at a time

A `json` file is decoded in chunks; a record is parsed as soon as it is complete. An incomplete one
is parsed again with twice as much text, so that a record is parsed a few times at most, and one
that is too long is refused by the limit.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from pretrain.preparation.filters import NOT_JSON, BadInputError, Document
from pretrain.preparation.input_parts import Slice
from pretrain.preparation.inputs.opening import InputStream
from pretrain.preparation.readers.lines import Lines, lines_of
from pretrain.preparation.readers.record_fields import BEYOND, RecordError, parse_object
from pretrain.preparation.readers.records import ReadRule, not_utf8, too_long
from pretrain.utils.safe_read import parse_json_at

CHUNK_BYTES = 2**20

# More than the longest token that may be cut at the end of a chunk, a string excepted.
_TOKEN_CHARS = 16
# With the byte-order marks of joined files.
_SPACE = re.compile("[ \t\n\r\ufeff]*")


def read_jsonl(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the documents of a slice. Memory: a line."""
    return read_records(lines_of(stream, piece, rule), rule)


def read_records(lines: Lines, rule: ReadRule) -> Iterator[Document]:
    """Yields the document of each line. Raises: DataError."""
    for text, utf8 in lines:
        if lines.bad is not None:
            yield rule.leave_out(lines.bad, lines.consumed_bytes)
            continue
        if not utf8 or utf8.isspace():
            continue
        try:
            document = rule.build(parse_object(text), lines.consumed_bytes)
        except RecordError as error:
            document = rule.leave_out(error.at(lines.place()), lines.consumed_bytes)
        yield document


def read_json(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the documents of a file. Memory: a record, of at most the limit, and a chunk."""
    before = 0
    for line, record in _records(_JsonText(stream, rule)):
        position = stream.stored.tell()
        try:
            if isinstance(record, BadInputError):
                document: Document = rule.leave_out(record, position - before)
            else:
                document = rule.build(record, position - before)
        except RecordError as error:
            document = rule.leave_out(error.at(f"{stream.file.shown}:{line}"), position - before)
        before = position
        yield document


def _records(text: "_JsonText") -> Iterator[tuple[int, Any]]:
    """Yields the values of the list, or the objects, each with the line that it begins at."""
    if text.peek() != "[":
        yield text.take_object()
        # As `datasets` reads .json, which often has a record a line.
        while text.peek():
            yield text.take_object()
        return
    text.skip()
    separator = "," if text.peek() != "]" else "]"
    while separator == ",":
        yield text.take_object()
        separator = text.peek()
        if separator not in (",", "]"):
            raise text.error(
                "not JSON: ',' or ']' is missing",
                "separate records by commas and end the list",
            )
        if separator == ",":
            text.skip()
    text.skip()
    if text.peek():
        raise text.error("text after the list", "give one list")


class _JsonText:
    """The text of a file from a position on, as much of it as is needed."""

    def __init__(self, stream: InputStream, rule: ReadRule) -> None:
        self._plain = stream.plain
        self._name = stream.file.shown
        self._limit = rule.limit
        # A wrong byte becomes a surrogate, for which its record is left out.
        errors = "surrogateescape" if rule.skips else "strict"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)
        self._num_bytes = 0  # read so far
        self._text = ""
        self._at = 0  # in _text
        self._line = 1  # of _at
        self._is_complete = False

    def error(self, what: str, fix: str) -> BadInputError:
        """Builds the error of the text at the position."""
        return BadInputError(what, where=f"{self._name}:{self._line}", fix=fix, reason=NOT_JSON)

    def peek(self) -> str:
        """Skips white space; returns the character after it, or the empty string at the end."""
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
        """Skips the character that `peek` returned."""
        self._at += 1

    def take_object(self) -> tuple[int, Any]:
        """Parses the next object and skips it; returns its first line, and it or its error."""
        if self.peek() != "{":
            # Other values might be cut short and still be JSON, as numbers are; no object is.
            raise self.error(
                "not a JSON object" if self.peek() else "not JSON: the file ends early",
                'write a list of records such as {"text": "..."}',
            )
        line = self._line
        while True:
            end = len(self._text)
            try:
                value, end = parse_json_at(self._text, self._at)
                is_parsed = True
            except json.JSONDecodeError as error:
                self._check_unfinished(error)
                is_parsed = False
            except ValueError as error:
                raise self.error(
                    f"{BEYOND}: {error}",
                    "change the record that begins there",
                ) from None
            if end - self._at > self._limit:
                value = too_long("a record", self._limit, f"{self._name}:{line}")
                if not is_parsed:
                    raise value
            if is_parsed:
                self._advance(end)
                return line, value
            self._read(max(CHUNK_BYTES, len(self._text) - self._at))

    def _check_unfinished(self, error: json.JSONDecodeError) -> None:
        """Raises the error of an object that no further text can complete."""
        is_cut = error.msg.startswith("Unterminated string")
        is_cut = is_cut or error.pos >= len(self._text) - _TOKEN_CHARS
        if self._is_complete or not is_cut:
            self._line += self._text.count("\n", self._at, error.pos)
            raise self.error(f"not JSON: {error.msg}", "correct it there") from None

    def _advance(self, to: int) -> None:
        self._line += self._text.count("\n", self._at, to)
        self._at = to

    def _read(self, num_bytes: int) -> None:
        """Appends the text of at most `num_bytes` more, and drops the skipped text."""
        data = self._plain.read(num_bytes)
        self._is_complete = not data
        # A character that the last chunk cut is in the decoder.
        start = self._num_bytes - len(self._decoder.getstate()[0])
        self._num_bytes += len(data)
        try:
            more = self._decoder.decode(data, final=self._is_complete)
        except UnicodeDecodeError as error:
            raise not_utf8(error, self._name, start) from None
        self._text = self._text[self._at :] + more
        self._at = 0
