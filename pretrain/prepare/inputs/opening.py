"""Open input files, decompressed; damage is named with its place.

Memory is bounded at any ratio: no more is decompressed than is asked for.
"""

import gzip
import io
import os
import sys
import zlib
from typing import Any, BinaryIO, Self, cast

from pretrain.errors import DataError
from pretrain.prepare.filters import BadInputError
from pretrain.prepare.input_parts import InputFile
from pretrain.prepare.inputs.remote_files import open_remote, stat_remote

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CHUNK_BYTES = 128 * 2**10

_DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, zstd.ZstdError)


class _Decompressed(io.RawIOBase):
    """Output of a decoder; its errors become DataError."""

    def __init__(self, decoder: Any, file: InputFile) -> None:
        self._decoder = decoder
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            # At most one read below, so that what comes before a damage is given first.
            data = self._decoder.read1(len(buffer))
        except _DAMAGE as error:
            what = f"truncated or damaged {self._file.compression}: {error}"
            where = f"{self._file.shown}, byte {self._position} (uncompressed)"
            raise BadInputError(what, where=where, fix="copy or compress the file again") from None
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def decompress(stored: BinaryIO, file: InputFile) -> BinaryIO:
    """Returns the uncompressed bytes of a file; reads of damaged data raise DataError."""
    if not file.compression:
        return stored
    is_gzip = file.compression == "gzip"
    decoder: Any = gzip.GzipFile(fileobj=stored) if is_gzip else zstd.ZstdFile(stored)
    return cast(BinaryIO, io.BufferedReader(_Decompressed(decoder, file), CHUNK_BYTES))


class InputStream:
    """An open input file, to `check_unchanged` at its end; leaving its `with` closes it.

    Attributes:
        file: The file as it was listed.
        stored: Bytes as stored; can seek.
        plain: The same, uncompressed; can seek only where nothing is compressed.
    """

    __slots__ = ("file", "plain", "stored")

    def __init__(self, file: InputFile) -> None:
        """Opens a file that was listed. Raises: DataError: changed; OSError, with its filename."""
        self.file = file
        # A Path would cost as much as reading a small file does.
        self.stored: BinaryIO = open_remote(file) if file.is_remote else open(file.path, "rb")  # noqa: PTH123, SIM115
        self.plain = decompress(self.stored, file)
        # A server is asked only in the end, as each question costs.
        if not file.is_remote:
            try:
                self.check_unchanged()
            except BaseException:
                self.stored.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stored.close()

    def left_bytes(self, stop: int) -> int:
        """Returns the stored bytes from the position to `stop`, with what was read ahead."""
        return min(stop, max(stop - self.stored.tell(), 0) + CHUNK_BYTES)

    def check_unchanged(self) -> None:
        """Checks that this is still the file that was listed. Raises: DataError, OSError."""
        if self.file.is_remote:
            now = stat_remote(self.file.path)
            found = (now.size, now.version)
        else:
            status = os.fstat(self.stored.fileno())
            found = (status.st_size, str(status.st_mtime_ns))
        if found != (self.file.size, self.file.version):
            raise DataError(
                "the file changed while it was being prepared",
                where=self.file.shown,
                fix="wait until it is complete, then start again",
            )
