"""Lines of a file, one at a time, none longer than a limit, each with its place."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pretrain.prepare.inputs.opening import InputStream
from pretrain.prepare.readers.errors import too_long
from pretrain.prepare.sources import Slice

SKIP_BYTES = 2**20


class Lines:
    """The lines whose first byte lies in [start, stop), in order, with their ends.

    Iterate once. While a line is the last that was given:

    Attributes:
        offset: Its first byte, uncompressed.
        consumed_bytes: What it took from the file as stored.
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
            name: Of the file, for errors.
            limit: Bytes that a line may have, its end included.
            start: First byte that a line may begin at; what began before it is passed over.
            stop: First byte that none may begin at. None: the end of the file.
            stored: What `plain` is decompressed from, by which `consumed_bytes` goes. None: it is not compressed.
        """
        self._plain, self._name, self._limit, self._start, self._stop = plain, name, limit, start, stop
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
        readline, room, stop = self._plain.readline, self._limit + 1, self._stop
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
        """Where the last line is, for errors: file and number; or byte, where lines would be counted over a network.

        Lines before `start` are counted only now, so that reading need not.
        """
        if self._start and self._local is None:
            return f"{self._name}@{self.offset}"
        before = _count_newlines(self._local, self._first) if self._start and self._local else 0
        return f"{self._name}:{before + self._number}"

    def count_all(self) -> int:
        """Returns how many lines the file has, those that were given included; reads to the end."""
        number, last = self._number, b"\n"
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
