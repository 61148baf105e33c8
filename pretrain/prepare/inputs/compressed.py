"""Compressed input files: their bytes as they were, and damage named with its place.

Memory is bounded whatever the ratio: no more is decompressed than is asked for.
"""

import gzip
import io
import sys
import zlib
from typing import Any, BinaryIO, cast

from pretrain.errors import DataError
from pretrain.prepare.sources import InputFile

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CHUNK_BYTES = 128 * 2**10
_DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, zstd.ZstdError)


class _Decompressed(io.RawIOBase):
    """What a decoder gives, its errors made ours."""

    def __init__(self, decoder: Any, file: InputFile) -> None:
        self._decoder, self._file, self._position = decoder, file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._decoder.read(len(buffer))
        except _DAMAGE as error:
            raise DataError(
                f"truncated or damaged {self._file.compression}: {error}",
                where=f"{self._file.shown}@{self._position} (uncompressed)",
                fix="copy or compress the file again",
            ) from None
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def decompress(stored: BinaryIO, file: InputFile) -> BinaryIO:
    """Returns the uncompressed bytes of `stored`, the open `file`; itself where that is not compressed.

    Its reads raise DataError where the data are truncated or damaged. It cannot seek.
    """
    if not file.compression:
        return stored
    decoder: Any = gzip.GzipFile(fileobj=stored) if file.compression == "gzip" else zstd.ZstdFile(stored)
    return cast(BinaryIO, io.BufferedReader(_Decompressed(decoder, file), CHUNK_BYTES))
