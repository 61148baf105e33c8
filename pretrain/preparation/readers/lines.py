"""Readers of text files.

text      a file is one document, byte for byte, but for byte-order marks at the beginning of lines
lines     a line is a document, without its end; an empty line is an empty one
paired    two files; the n-th line of the one is the source, that of the other the target
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from pretrain.errors import DataError
from pretrain.preparation.filters import BadInputError, Document
from pretrain.preparation.input_parts import Slice
from pretrain.preparation.inputs.opening import InputStream
from pretrain.preparation.readers.records import UTF8_BOM, ReadRule, not_utf8, too_long, without_marks

BLOCK_BYTES = 2**20


def read_text(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the one document of a file. Memory: the file, of at most the limit."""
    file = stream.file
    if not file.compression and file.size > rule.limit:
        raise too_long(f"a document of {file.size} bytes", rule.limit, file.shown)
    utf8 = _read_up_to(stream.plain, rule.limit) if file.compression else stream.plain.read()
    if len(utf8) > rule.limit:
        raise too_long("a document", rule.limit, file.shown)
    utf8 = without_marks(utf8)
    try:
        text = utf8.decode()
    except UnicodeDecodeError as error:
        yield rule.leave_out(not_utf8(error, file.shown, 0), file.size)
    else:
        yield Document(text, utf8, file.size)


def _read_up_to(plain: BinaryIO, limit: int) -> bytes:
    """Reads to the end, or a block further than the limit."""
    utf8 = bytearray()
    while len(utf8) <= limit and (block := plain.read(BLOCK_BYTES)):
        utf8 += block
    return bytes(utf8)


def read_lines(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the documents of a slice. Memory: a line."""
    lines = lines_of(stream, piece, rule)
    for text, utf8 in lines:
        if lines.bad is None:
            yield Document(text, utf8, lines.consumed_bytes)
        else:
            yield rule.leave_out(lines.bad, lines.consumed_bytes)


def read_paired(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the pairs of two files; a side, or both, may be empty. Memory: a line of each."""
    pair = stream.file.pair
    assert pair is not None
    with InputStream(pair) as other:
        sources = lines_of(stream, piece, rule)
        targets = lines_of(other, Slice(pair, 0, pair.size), rule)
        remaining = iter(sources)
        right = iter(targets)
        while True:
            source = next(remaining, None)
            target = next(right, None)
            if source is None or target is None:
                break
            consumed_bytes = sources.consumed_bytes + targets.consumed_bytes
            bad = sources.bad or targets.bad
            if bad is None:
                yield Document(*target, consumed_bytes, source=source[0])
            else:
                yield rule.leave_out(bad, consumed_bytes)
        if source is not target:
            place = sources.place() if target is None else targets.place()
            counts = f"{sources.count_all()} lines, {pair.shown} {targets.count_all()}"
            raise DataError(
                f"{stream.file.shown} has {counts}: this line has no pair",
                where=place,
                fix="give files that pair line by line",
            )
        other.check_unchanged()


@dataclass
class Lines:
    """The lines whose first byte lies in [start, stop), in order, none longer than a limit.

    `consumed_bytes` are those that the last yielded line took from the file as stored. With `skips`, a
    line that is too long or not UTF-8 is empty, and `bad` has its error. A byte-order mark at the
    beginning of a line, as joined files have it, is dropped.
    """

    plain: BinaryIO  # at its beginning; can seek if `start` is not 0
    name: str  # of the file, for errors
    limit: int  # bytes that a line may have, its end included
    stored: BinaryIO | None = None  # source of a decompressed `plain`, for `consumed_bytes`
    start: int = 0
    stop: int | None = None
    local: Path | None = None  # to count the lines before `start`, for errors
    skips: bool = False
    consumed_bytes: int = 0
    bad: BadInputError | None = None  # of the last line
    _first: int = 0
    _number: int = 0
    _offset: int = 0
    _before: int | None = None  # lines before `start`

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        """Yields each line, without LF or CR LF, as text and in UTF-8. Raises: BadInputError."""
        readline = self.plain.readline
        room = self.limit + 1
        stop = self.stop
        stored = self.stored
        before = stored.tell() if stored is not None else 0
        offset = self._first = self._find_first()
        while stop is None or offset < stop:
            line = readline(room)
            if not line:
                return
            self._offset = offset
            self._number += 1
            self.bad = None
            num_bytes = len(line)
            if num_bytes == room:
                num_bytes += self._pass_over(line)
                line = b""
            self.consumed_bytes = num_bytes
            if stored is not None:
                position = stored.tell()
                self.consumed_bytes = position - before
                before = position
            utf8 = line[:-1].removesuffix(b"\r") if line.endswith(b"\n") else line
            if utf8.startswith(UTF8_BOM):
                utf8 = utf8[len(UTF8_BOM) :]
            try:
                text = utf8.decode()
            except UnicodeDecodeError as error:
                self._leave_out(not_utf8(error, self.name, offset + line.index(utf8)))
                text, utf8 = "", b""
            yield text, utf8
            offset += num_bytes

    def _pass_over(self, line: bytes) -> int:
        """Reads the rest of a line that is too long, and drops it; returns its bytes."""
        self._leave_out(too_long("a line", self.limit, self.place()))
        num_bytes = 0
        while line and not line.endswith(b"\n"):
            line = self.plain.readline(BLOCK_BYTES)
            num_bytes += len(line)
        return num_bytes

    def _leave_out(self, error: BadInputError) -> None:
        if not self.skips:
            raise error from None
        self.bad = error

    def place(self) -> str:
        """Returns the place of the last line: file and number, or byte where it is remote."""
        if self.start and self.local is None:
            return f"{self.name}, byte {self._offset}"
        if self._before is None:
            # Counted only now, so that reading need not.
            self._before = _count_newlines(self.local, self._first) if self.local else 0
        return f"{self.name}:{self._before + self._number}"

    def count_all(self) -> int:
        """Returns the number of lines in the file; reads to the end."""
        number = self._number
        last = b"\n"
        while block := self.plain.read(BLOCK_BYTES):
            number += block.count(b"\n")
            last = block[-1:]
        return number + (last != b"\n")

    def _find_first(self) -> int:
        """Returns the offset of the first line from `start` on, or `stop`."""
        if self.start == 0:
            return 0
        offset = self.start - 1
        self.plain.seek(offset)
        while line := self.plain.readline(BLOCK_BYTES):
            offset += len(line)
            if line.endswith(b"\n") or (self.stop is not None and offset >= self.stop):
                break
        return offset


def lines_of(stream: InputStream, piece: Slice, rule: ReadRule) -> Lines:
    """Returns the lines of a slice of an open input file."""
    file = stream.file
    lines = Lines(stream.plain, file.shown, rule.limit, skips=rule.skips)
    if file.compression:
        return replace(lines, stored=stream.stored)
    local = None if file.is_remote else Path(file.path)
    return replace(lines, start=piece.start, stop=piece.stop, local=local)


def _count_newlines(path: Path, stop: int) -> int:
    """Counts the ends of lines in the first `stop` bytes of a file."""
    number = 0
    with path.open("rb") as file:
        while stop > 0 and (block := file.read(min(stop, BLOCK_BYTES))):
            number += block.count(b"\n")
            stop -= len(block)
    return number
