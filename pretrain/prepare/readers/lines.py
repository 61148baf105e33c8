"""Lines of a file, one at a time, none longer than a limit, each with its place."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pretrain.errors import DataError
from pretrain.prepare.filters import Document
from pretrain.prepare.input_parts import Slice
from pretrain.prepare.inputs.opening import InputStream, open_input
from pretrain.prepare.readers.rule import ReadRule, decode, not_utf8, too_long

SKIP_BYTES = 2**20


class Lines:
    """The lines whose first byte lies in [start, stop), in order, with their ends.

    Iterate once. While a line is the last that was given:

    Attributes:
        offset: Offset of its first byte, uncompressed.
        consumed_bytes: Bytes that it took from the file as stored.
    """

    def __init__(
        self,
        plain: BinaryIO,
        name: str,
        limit: int,
        *,
        start: int = 0,
        stop: int | None = None,
        stored: BinaryIO | None = None,
    ) -> None:
        """Takes over an open file.

        Args:
            plain: At its beginning; can seek if `start` is not 0.
            name: Name of the file, for errors.
            limit: Bytes that a line may have, its end included.
            start: First byte that a line may begin at; what began before it is passed over.
            stop: First byte that none may begin at. None: the end of the file.
            stored: What `plain` is decompressed from, by which `consumed_bytes` goes. None: it is not compressed.
        """
        self._plain = plain
        self._name = name
        self._limit = limit
        self._start = start
        self._stop = stop
        self._stored = stored
        self._local: Path | None = None
        self._first = self._number = 0
        self.offset = start
        self.consumed_bytes = 0

    @classmethod
    def of_slice(cls, stream: InputStream, piece: Slice, limit: int) -> "Lines":
        """The lines of a slice of an open input file."""
        file = stream.file
        if file.compression:
            lines = cls(stream.plain, file.shown, limit, stored=stream.stored)
        else:
            lines = cls(stream.plain, file.shown, limit, start=piece.start, stop=piece.stop)
        lines._local = None if file.is_remote else Path(file.path)
        return lines

    def __iter__(self) -> Iterator[bytes]:
        """Yields the lines. Raises: DataError, for one that is too long."""
        readline = self._plain.readline
        room = self._limit + 1
        stop = self._stop
        stored = self._stored
        before = stored.tell() if stored is not None else 0
        offset = self._first = self._find_first()
        while stop is None or offset < stop:
            line = readline(room)
            if not line:
                return
            self.offset = offset
            self._number += 1
            if len(line) == room:
                raise too_long("a line", self._limit, self.place())
            self.consumed_bytes = len(line)
            if stored is not None:
                position = stored.tell()
                self.consumed_bytes, before = position - before, position
            offset += len(line)
            yield line

    def place(self) -> str:
        """Returns the place of the last line, for errors: file and number, or byte where lines are remote.

        Lines before `start` are counted only now, so that reading need not.
        """
        if self._start and self._local is None:
            return f"{self._name}@{self.offset}"
        before = _count_newlines(self._local, self._first) if self._start and self._local else 0
        return f"{self._name}:{before + self._number}"

    def count_all(self) -> int:
        """Returns how many lines the file has, those that were given included; reads to the end."""
        number = self._number
        last = b"\n"
        while block := self._plain.read(SKIP_BYTES):
            number += block.count(b"\n")
            last = block[-1:]
        return number + (last != b"\n")

    def _find_first(self) -> int:
        """Returns where the first line begins, at `start` or after; looks no further than `stop`."""
        if self._start == 0:
            return 0
        offset = self._start - 1
        self._plain.seek(offset)
        while line := self._plain.readline(SKIP_BYTES):
            offset += len(line)
            if line.endswith(b"\n") or (self._stop is not None and offset >= self._stop):
                break
        return offset


def _count_newlines(path: Path, stop: int) -> int:
    """Counts the ends of lines in the first `stop` bytes of a file."""
    number = 0
    with path.open("rb") as file:
        while stop > 0 and (block := file.read(min(stop, SKIP_BYTES))):
            number += block.count(b"\n")
            stop -= len(block)
    return number


def strip_end(line: bytes) -> bytes:
    """Returns a line without its end, LF or CR LF."""
    return line[:-1].removesuffix(b"\r") if line.endswith(b"\n") else line


# `lines`: a line is a document, without its end; an empty line is an empty one.


UTF8_BOM = b"\xef\xbb\xbf"


def line_text(line: bytes, lines: Lines, name: str) -> tuple[str, bytes]:
    """Returns the text of the last line of `lines`, and it in UTF-8. Raises: DataError."""
    utf8 = strip_end(line)
    start = lines.offset
    if start == 0 and utf8.startswith(UTF8_BOM):
        utf8, start = utf8[len(UTF8_BOM) :], len(UTF8_BOM)
    return decode(utf8, name, start), utf8


def read_lines(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the documents of a slice. Memory: a line."""
    lines = Lines.of_slice(stream, piece, rule.limit)
    for line in lines:
        text, utf8 = line_text(line, lines, stream.file.shown)
        yield Document(text, utf8, lines.consumed_bytes)


# `text`: a file is one document, byte for byte, without translation of line ends.


BLOCK_BYTES = 2**20


def read_text(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the one document of a file. Memory: the file, of at most the limit."""
    file = stream.file
    if not file.compression and file.size > rule.limit:
        raise too_long(f"a document of {file.size} bytes", rule.limit, file.shown)
    utf8 = _read_up_to(stream.plain, rule.limit) if file.compression else stream.plain.read()
    if len(utf8) > rule.limit:
        raise too_long("a document", rule.limit, file.shown)
    try:
        text = utf8.decode()
    except UnicodeDecodeError as error:
        if not rule.skip_undecodable:
            raise not_utf8(error, file.shown, 0) from None
        yield Document("", b"", file.size, is_undecodable=True)
    else:
        yield Document(text, utf8, file.size)


def _read_up_to(plain: BinaryIO, limit: int) -> bytes:
    """Reads to the end, or a block further than the limit."""
    utf8 = bytearray()
    while len(utf8) <= limit and (block := plain.read(BLOCK_BYTES)):
        utf8 += block
    return bytes(utf8)


# `paired`: two files; the n-th line of the one is the source, that of the other the target.


def read_paired(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the pairs of two files; a side, or both, may be empty. Memory: a line of each.

    Raises:
        DataError: Malformed text, or files of which one has more lines.
        OSError: The other file cannot be read.
    """
    pair = stream.file.pair
    assert pair is not None
    with open_input(pair) as other:
        sources = Lines.of_slice(stream, piece, rule.limit)
        targets = Lines.of_slice(other, Slice(pair, 0, pair.size), rule.limit)
        left, right = iter(sources), iter(targets)
        while True:
            source_line, target_line = next(left, None), next(right, None)
            if source_line is None or target_line is None:
                break
            source, _ = line_text(source_line, sources, stream.file.shown)
            target, utf8 = line_text(target_line, targets, pair.shown)
            yield Document(target, utf8, sources.consumed_bytes + targets.consumed_bytes, source=source)
        if source_line is not None or target_line is not None:
            longer = sources if target_line is None else targets
            place = longer.place()
            raise DataError(
                f"{stream.file.shown} has {sources.count_all()} lines, {pair.shown} {targets.count_all()}: "
                "this line has no pair",
                where=place,
                fix="give files that pair line by line",
            )
        other.check_unchanged()
