"""Downloads of single files: resumed, verified, and visible only when they are whole.

    attempt -> pieces -> hash and AtomicWriter        broken off: wait, continue by range (utils/remote.py)
            -> the hash is that of the index: fsync, rename            it is not: thrown away, fetched once more

Threads and their order are in fetch.py, the target folder in cache.py.
"""

import errno
import fcntl
import hashlib
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pretrain.errors import DataError
from pretrain.shards.cache_locks import try_lock
from pretrain.shards.store import Patience, UnavailableError
from pretrain.utils.io import AtomicWriter
from pretrain.utils.remote import PIECE_BYTES, POLL_S, AbandonedError, RemoteAttempts, call_remote, open_url

RANGE_BYTES = 2**23
"""Bytes that one request of s3 or gs asks for."""
MAX_SMALL_BYTES = 2**28
"""Of a file whose size is not known beforehand: an index or a tokenizer."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemoteShardFile:
    """A file as the index describes it.

    Attributes:
        name: Relative to the remote folder.
        num_bytes: Size of the file.
        digest: Hex: the SHA-256 (64 digits), or the CRC32 (8 digits).
    """

    name: str
    num_bytes: int
    digest: str

    def hasher(self) -> "_Hasher":
        """Returns what makes such a digest."""
        return hashlib.sha256() if len(self.digest) == 64 else _Crc32()


@dataclass(slots=True)
class DownloadProgress:
    """Progress of a download; `trouble` is the last failure, empty while bytes come."""

    num_bytes: int = 0
    received: int = 0
    trouble: str = ""

    def __str__(self) -> str:
        text = f"{self.received / 2**20:.1f} of {self.num_bytes / 2**20:.1f} MiB"
        return f"{text}, {self.trouble}" if self.trouble else text


def download_once(
    url: str, file: RemoteShardFile, path: Path, *, patience: Patience, abandoned: Callable[[], bool]
) -> None:
    """Fetches a file unless its bytes are right; of several processes, one fetches.

    Args and errors: as of `download`.
    """
    lock_path = path.with_name(f"{path.name}.lock")
    while (descriptor := try_lock(lock_path, fcntl.LOCK_EX)) is None:
        if abandoned():
            raise AbandonedError
        time.sleep(POLL_S)
    try:
        if not _is_whole(path, file):
            for leftover in path.parent.glob(f"{path.name}.tmp-*"):
                leftover.unlink(missing_ok=True)  # of a process that died: we have the lock
            download(url, file, path, patience=patience, progress=DownloadProgress(), abandoned=abandoned)
    finally:
        lock_path.unlink(missing_ok=True)
        os.close(descriptor)


def _is_whole(path: Path, file: RemoteShardFile) -> bool:
    """Returns whether a file has the size and the hash that the index says."""
    hasher = file.hasher()
    try:
        if path.stat().st_size != file.num_bytes:
            return False
        with path.open("rb") as opened:
            while piece := opened.read(PIECE_BYTES):
                hasher.update(piece)
    except OSError:
        return False
    return hasher.hexdigest() == file.digest


class _Hasher(Protocol):
    def update(self, piece: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


class _Crc32:
    """CRC32 with the interface of hashlib."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, piece: bytes) -> None:
        self._value = zlib.crc32(piece, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def download(
    url: str,
    file: RemoteShardFile,
    path: Path,
    *,
    patience: Patience,
    progress: DownloadProgress,
    abandoned: Callable[[], bool],
) -> None:
    """Fetches a file; its name appears when its bytes are those of the index and durable.

    Args:
        url: Address of the remote folder.
        file: The file to fetch.
        path: Where to; what is there is replaced.
        patience: See there.
        progress: Kept up to date.
        abandoned: Looked at between pieces and while waiting.

    Raises:
        DataError: The server has another file, or not this one.
        UnavailableError: The server has been away for too long, or forbids it.
        DiskError: The disk refused.
        AbandonedError: It was.
    """
    source = f"{url}/{file.name}"
    for is_last in (False, True):
        writer = AtomicWriter(path)
        try:
            with data_errors():
                wrong = _receive(source, file, writer, patience, progress, abandoned)
            if not wrong:
                writer.commit()
                return
        finally:
            writer.discard()
        if is_last:
            raise DataError(
                f"is not the file of the index: {wrong}, twice",
                where=source,
                fix="upload this file again, or the index",
            )
        _log.warning("%s is not the file of the index: %s; fetching it again", source, wrong)


def _receive(
    source: str,
    file: RemoteShardFile,
    writer: AtomicWriter,
    patience: Patience,
    progress: DownloadProgress,
    abandoned: Callable[[], bool],
) -> str:
    """Downloads in as many attempts as it takes; returns what is wrong, or nothing."""
    hasher = file.hasher()
    attempts = RemoteAttempts(source, patience, abandoned)
    progress.num_bytes = file.num_bytes
    progress.received = 0
    while progress.received < file.num_bytes:
        try:
            with closing(open_url(source, progress.received)) as stream:
                if stream.num_bytes not in (None, file.num_bytes):
                    return f"it has {stream.num_bytes} bytes instead of {file.num_bytes}"
                while piece := stream.read(RANGE_BYTES):
                    if abandoned():
                        raise AbandonedError
                    attempts.succeed()
                    progress.trouble = ""
                    progress.received += len(piece)
                    if progress.received > file.num_bytes:
                        return f"it has more than {file.num_bytes} bytes"
                    writer.write(piece)
                    hasher.update(piece)
            if progress.received < file.num_bytes:
                raise ConnectionError(f"broken off after {progress.received} of {file.num_bytes} bytes")
        except Exception as error:
            progress.trouble = attempts.explain(error)
            attempts.wait(progress.trouble)
    found = hasher.hexdigest()
    return "" if found == file.digest else f"its hash is {found} instead of {file.digest}"


def read_small(url: str, *, patience: Patience, abandoned: Callable[[], bool]) -> bytes:
    """Fetches a file of unknown size into memory.

    Raises:
        DataError: The server failed, or the file has more than `MAX_SMALL_BYTES`.
        AbandonedError: The wait was abandoned.
    """
    with data_errors():
        return call_remote(url, lambda: _read_limited(url), patience, abandoned)


def _read_limited(url: str) -> bytes:
    content = bytearray()
    with closing(open_url(url)) as stream:
        while piece := stream.read(PIECE_BYTES):
            content += piece
            if len(content) > MAX_SMALL_BYTES:
                raise DataError(f"has more than {MAX_SMALL_BYTES} bytes", where=url, fix="correct data.path")
    return bytes(content)


@contextmanager
def data_errors() -> Iterator[None]:
    """Raises failures as `DataError` where the file is missing, else `UnavailableError`."""
    try:
        yield
    except OSError as error:
        kind = DataError if isinstance(error, FileNotFoundError) else UnavailableError
        is_away = error.errno == errno.EIO
        fix = "start again when the server is back" if is_away else "correct data.path, or give access to it"
        raise kind(f"cannot be fetched: {error.strerror}", where=str(error.filename), fix=fix) from None
