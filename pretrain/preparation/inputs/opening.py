"""Open input files, decompressed; damage, and limits of the decoders, are named with their place.

Memory is bounded at any ratio: no more is decompressed than is asked for, and the window of the
format: up to 2 GiB of zstd (`--long=31`), 4 GiB of xz.
"""

import bz2
import gzip
import io
import lzma
import os
import sys
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, Self, cast

from pretrain.errors import DataError
from pretrain.preparation.filters import TOO_LARGE, BadInputError
from pretrain.preparation.input_parts import InputFile
from pretrain.preparation.inputs.remote_files import open_remote, stat_remote
from pretrain.utils.foreign_files import HEAD_BYTES, name_compressed

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CHUNK_BYTES = 128 * 2**10
READ_BYTES = 16 * 2**10

_DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, zstd.ZstdError, lzma.LZMAError)
# Parts of messages of decoders about whole files: the limit, and how to decompress them elsewhere.
_LIMITS = {
    "requires too much memory": ("it needs a window of more than 2 GiB", "zstd -d --ultra --memory=8GB"),
    "Dictionary mismatch": ("it needs the dictionary that it was compressed with", "zstd -d -D DICTIONARY"),
    "Memory usage limit": ("it needs more memory than xz may take", "xz -d"),
    "Unknown compression method": ("another method than deflate", "7z x"),
    "unsupported options": ("a filter that liblzma does not have", "xz -d"),
}


class _ShortReads:
    """A compressed file, of which decoders read little ahead: its position tells what is lost."""

    def __init__(self, stored: BinaryIO) -> None:
        self._stored = stored

    def read(self, num_bytes: int) -> bytes:
        """Returns up to `num_bytes`, and not many."""
        return self._stored.read(min(num_bytes, READ_BYTES))


class _JoinedStreams:
    """Output of a decoder over streams that are joined, of xz or bzip2, with zeros between or not.

    LZMAFile and BZ2File take what else is behind a stream for the end of the file.
    """

    def __init__(self, stored: BinaryIO, build_decoder: Callable[[], Any]) -> None:
        self._stored = stored
        self._build = build_decoder
        self._decoder: Any = None

    def read1(self, num_bytes: int) -> bytes:
        """Returns up to `num_bytes`; none at the end. Raises: EOFError, LZMAError, OSError."""
        while True:
            data = b""
            if self._decoder is None or self._decoder.eof:
                data = (self._decoder and self._decoder.unused_data.lstrip(b"\0")) or self._next()
                if not data:
                    return b""
                self._decoder = self._build()
            elif self._decoder.needs_input and not (data := self._stored.read(READ_BYTES)):
                raise EOFError("the file ended before the end of a stream")
            if plain := self._decoder.decompress(data, num_bytes):
                return bytes(plain)

    def _next(self) -> bytes:
        """Returns the beginning of the next stream; none at the end."""
        while block := self._stored.read(READ_BYTES):
            if data := block.lstrip(b"\0"):
                return data
        return b""


class _Decompressed(io.RawIOBase):
    """Output of a decoder; its errors become BadInputError."""

    def __init__(self, stored: BinaryIO, file: InputFile) -> None:
        self._stored = stored
        self._decoder = _DECODERS[file.compression](cast(BinaryIO, _ShortReads(stored)))
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            # At most one read below, so that what comes before a damage is given first.
            data = self._decoder.read1(len(buffer))
        except MemoryError:
            raise self._limit("its window has no room in memory", f"{self._file.compression} -d") from None
        except (*_DAMAGE, OSError) as error:
            if isinstance(error, OSError) and (error.errno or error.filename):
                raise  # of the disk or the server; bz2 has none of its own
            for said, (limit, command) in _LIMITS.items():
                if said in str(error):
                    raise self._limit(limit, command) from None
            self._refuse_other()
            where = f"{self._file.shown}, byte {self._position} (uncompressed)"
            raise BadInputError(
                f"truncated or damaged {self._file.compression}: {error}",
                where=where,
                fix="copy or compress the file again",
            ) from None
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _refuse_other(self) -> None:
        """Refuses a file that is not compressed so. Raises: BadInputError."""
        if self._position:
            return
        place = self._stored.tell()
        self._stored.seek(0)
        head = self._stored.read(HEAD_BYTES)
        self._stored.seek(place)
        compression = self._file.compression
        if named := name_compressed(compression, head):
            text = f"not {compression}, but {named[0]}, by its first bytes"
            raise BadInputError(text, where=self._file.shown, fix=named[1])

    def _limit(self, what: str, command: str) -> BadInputError:
        return BadInputError(
            f"a limit of the {self._file.compression} decoder, no damage: {what}",
            where=self._file.shown,
            fix=f"decompress it first: {command} FILE",
            reason=TOO_LARGE,
        )


def decompress(stored: BinaryIO, file: InputFile) -> BinaryIO:
    """Returns the uncompressed bytes of a file; reads of damaged data raise DataError."""
    if not file.compression:
        return stored
    return cast(BinaryIO, io.BufferedReader(_Decompressed(stored, file), CHUNK_BYTES))


def _open_zstd(stored: BinaryIO) -> Any:
    # Of public dumps, which zstd itself refuses without --long=31.
    return zstd.ZstdFile(stored, options={zstd.DecompressionParameter.window_log_max: 31})


_DECODERS: dict[str, Callable[[BinaryIO], Any]] = {
    "gzip": lambda stored: gzip.GzipFile(fileobj=stored),
    "zstd": _open_zstd,
    "xz": lambda stored: _JoinedStreams(stored, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ)),
    "bzip2": lambda stored: _JoinedStreams(stored, bz2.BZ2Decompressor),
}


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
        """Returns the stored bytes from the position to `stop`."""
        return max(stop - self.stored.tell(), 0)

    def check_unchanged(self) -> None:
        """Checks that this is still the file that was listed. Raises: DataError, OSError."""
        if self.file.is_remote:
            now = stat_remote(self.file.path)
            state = (now.size, now.version)
        else:
            status = os.fstat(self.stored.fileno())
            state = (status.st_size, str(status.st_mtime_ns))
        if state != (self.file.size, self.file.version):
            raise DataError(
                "the file changed while it was being prepared",
                where=self.file.shown,
                fix="wait until it is complete, then start again",
            )
