"""Reading: slices of input files -> documents, streamed, with an error that names file and line or byte.

    .txt .py .md   one document, byte for byte (no newline translation)
    .jsonl(.gz)    one document a line: the string under `text_field`

Memory is one document (and one line of a .jsonl). Malformed input is an error, never skipped: a silent hole in a
corpus is found months later, if ever.
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pretrain.data.sources import DOCUMENT_SUFFIXES, Slice
from pretrain.errors import DataError

_UTF8_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Document:
    """One text to tokenise.

    Attributes:
        text: Its characters; may be empty.
        utf8: The same in UTF-8.
        consumed_bytes: What it took from the input, on disk.
        is_undecodable: Stands for a file that is passed over; has no text.
    """

    text: str
    utf8: bytes
    consumed_bytes: int
    is_undecodable: bool = False


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads documents.

    Attributes:
        text_field: Key of the text in a jsonl line.
        skip_undecodable: Pass over a file that is not UTF-8 instead of failing; for the default corpus only.
    """

    text_field: str
    skip_undecodable: bool = False

    def read(self, slices: Iterable[Slice]) -> Iterator[Document]:
        """Yields the documents of `slices` in order.

        Raises:
            DataError: Malformed input, or a file that changed since it was listed.
            OSError: The file system failed.
        """
        for piece in slices:
            with Path(piece.file.path).open("rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_size, status.st_mtime_ns) != (piece.file.size, piece.file.mtime_ns):
                    raise DataError(
                        "the file changed while it was being prepared",
                        where=piece.file.path,
                        fix="wait until it is complete, then start again",
                    )
                if piece.file.path.endswith(DOCUMENT_SUFFIXES):
                    yield from self._read_whole(file, piece)
                elif piece.file.path.endswith(".gz"):
                    yield from self._read_gzip(file, piece)
                else:
                    yield from self._read_lines(file, piece)

    def _read_whole(self, file: BinaryIO, piece: Slice) -> Iterator[Document]:
        utf8 = file.read()
        try:
            text = utf8.decode()
        except UnicodeDecodeError as error:
            if not self.skip_undecodable:
                raise _not_utf8(piece.file.path, error.start, error) from None
            yield Document("", b"", len(utf8), is_undecodable=True)
        else:
            yield Document(text, utf8, len(utf8))

    def _read_gzip(self, file: BinaryIO, piece: Slice) -> Iterator[Document]:
        offset, before = 0, 0
        with gzip.GzipFile(fileobj=file) as lines:
            while True:
                try:
                    line = lines.readline()
                except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                    raise DataError(
                        f"truncated or damaged gzip: {error}",
                        where=f"{piece.file.path}@{offset} (uncompressed)",
                        fix="copy or compress the file again",
                    ) from None
                if not line:
                    return
                position = file.tell()
                yield from self._parse_line(line, piece, offset, position - before)
                offset, before = offset + len(line), position

    def _read_lines(self, file: BinaryIO, piece: Slice) -> Iterator[Document]:
        offset = piece.start
        if offset:
            file.seek(offset - 1)
            offset += len(file.readline()) - 1
        while offset < piece.stop:
            line = file.readline()
            yield from self._parse_line(line, piece, offset, len(line))
            offset += len(line)

    def _parse_line(self, line: bytes, piece: Slice, offset: int, consumed: int) -> Iterator[Document]:
        """Yields the document of a line that starts at byte `offset`, or nothing where the line is blank."""
        if offset == 0:
            line = line.removeprefix(_UTF8_BOM)
        if not line.strip():
            return
        path = piece.file.path
        try:
            row = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise _not_utf8(path, offset + error.start, error) from None
        except (ValueError, RecursionError) as error:
            raise _bad_line(path, offset, f"not JSON: {error}", "write one JSON object a line") from None
        if not isinstance(row, dict):
            raise _bad_line(path, offset, "not a JSON object", f'write {{"{self.text_field}": "..."}}')
        text = row.get(self.text_field)
        if not isinstance(text, str):
            found = "is absent" if text is None and self.text_field not in row else f"is {_kind(text)}, not a string"
            fields = ", ".join(sorted(row)[:20]) or "none"
            raise _bad_line(
                path, offset, f"field {self.text_field!r} {found}; fields: {fields}", "choose one with --text-field"
            )
        try:
            utf8 = text.encode()
        except UnicodeEncodeError as error:
            escape = ascii(error.object[error.start])
            raise _bad_line(path, offset, f"unpaired surrogate {escape} in the text", "remove it") from None
        yield Document(text, utf8, consumed)


def _not_utf8(path: str, offset: int, error: UnicodeDecodeError) -> DataError:
    byte = error.object[error.start]
    return DataError(
        f"invalid UTF-8: byte 0x{byte:02x} ({error.reason})", where=f"{path}@{offset}", fix="convert the file to UTF-8"
    )


def _bad_line(path: str, offset: int, what: str, fix: str) -> DataError:
    """Builds the error of the line at byte `offset`; counts lines only now, so that reading need not."""
    number, left = 1, offset
    with gzip.open(path) if path.endswith(".gz") else Path(path).open("rb") as file:
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            number += block.count(b"\n")
            left -= len(block)
    return DataError(what, where=f"{path}:{number}", fix=fix)


def _kind(value: object) -> str:
    """The JSON name of a value's type."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", list: "a list"}
    return names.get(type(value), "an object")
