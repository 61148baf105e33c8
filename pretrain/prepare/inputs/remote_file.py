"""A remote file as a file object: read forward in blocks, each tried again, from where the last one ended."""

import errno
import io
from contextlib import suppress
from typing import Any, BinaryIO, cast

from pretrain.prepare.inputs.remote import filesystem
from pretrain.prepare.inputs.retry import call_remote
from pretrain.prepare.sources import InputFile

BLOCK_BYTES = 8 * 2**20
SKIP_BYTES = 2**20


class RemoteFile(io.RawIOBase):
    """The bytes of a remote file, by range where the server can, else as one stream that is opened anew to go back.

    A server that dies is asked again for what is missing. Where it knows no ranges, that means from the beginning, and
    what was read before is thrown away. Memory: one block.
    """

    def __init__(self, file: InputFile) -> None:
        """Opens nothing yet."""
        self._file = file
        self._position = 0
        self._ranges: Any = None
        self._stream: Any = None
        self._stream_position = 0
        self._has_ranges = True

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is, if at a cost where the server knows no ranges."""
        return True

    def tell(self) -> int:
        """The position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves; nothing is fetched before the next read."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fills `buffer`, up to a block. Raises: OSError, as `call_remote` does."""
        start = self._position
        stop = min(start + min(len(buffer), BLOCK_BYTES), self._file.size)
        if start >= stop:
            return 0
        data = call_remote(self._file.path, lambda: self._fetch(start, stop))
        buffer[: len(data)] = data
        self._position = start + len(data)
        return len(data)

    def readall(self) -> bytes:
        """Reads the rest, a block at a time."""
        blocks = []
        while block := self.read(BLOCK_BYTES):
            blocks.append(block)
        return b"".join(blocks)

    def close(self) -> None:
        """Lets go of the connection."""
        self._drop()
        super().close()

    def _fetch(self, start: int, stop: int) -> bytes:
        """Returns the bytes [start, stop). Raises whatever the network does."""
        try:
            data = self._fetch_range(start, stop) if self._has_ranges else self._fetch_stream(start, stop)
        except Exception:
            self._drop()
            raise
        if len(data) != stop - start:
            self._drop()
            raise ConnectionError(errno.ECONNRESET, f"{len(data)} bytes came where {stop - start} were asked for")
        return data

    def _fetch_range(self, start: int, stop: int) -> bytes:
        if self._ranges is None:
            path, size = self._file.path, self._file.size
            self._ranges = filesystem(path).open(path, "rb", size=size, cache_type="none")
        self._ranges.seek(start)
        try:
            return self._ranges.read(stop - start)
        except ValueError as error:
            # What fsspec raises when a server sends the whole file; others derive from it.
            if type(error) is not ValueError or not self._file.path.startswith("http"):
                raise
        self._drop()
        self._has_ranges = False
        return self._fetch_stream(start, stop)

    def _fetch_stream(self, start: int, stop: int) -> bytes:
        if self._stream is None or self._stream_position > start:
            self._drop()
            path, size = self._file.path, self._file.size
            self._stream = filesystem(path).open(path, "rb", size=size, block_size=0)
            self._stream_position = 0
        while self._stream_position < start and self._read_stream(min(start - self._stream_position, SKIP_BYTES)):
            pass
        pieces = []
        while self._stream_position < stop and (piece := self._read_stream(stop - self._stream_position)):
            pieces.append(piece)
        return b"".join(pieces)

    def _read_stream(self, num_bytes: int) -> bytes:
        data = self._stream.read(num_bytes)
        self._stream_position += len(data)
        return data

    def _drop(self) -> None:
        for remote in (self._ranges, self._stream):
            if remote is not None:
                with suppress(Exception):  # it is broken already, or finished with
                    remote.close()
        self._ranges = self._stream = None


def open_remote(file: InputFile) -> BinaryIO:
    """Opens a remote file for reading, buffered by blocks."""
    return cast(BinaryIO, io.BufferedReader(RemoteFile(file), min(BLOCK_BYTES, max(file.size, 1))))
