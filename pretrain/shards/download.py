"""One remote file to one local file: resumed, verified while it comes, and visible only when it is whole.

    attempt -> pieces -> hash and AtomicWriter        broken off: wait (network.py), go on by range
            -> the hash is that of the index: fsync, rename            it is not: thrown away, fetched once more

Deliberately not here: who downloads, and when (fetch.py); where to (cache.py).
"""

import fcntl
import hashlib
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pretrain.errors import DataError
from pretrain.shards.cache_locks import try_lock
from pretrain.shards.store import Patience, UnavailableError
from pretrain.shards.transport import PIECE_BYTES, TransientError, Transport
from pretrain.utils.io import AtomicWriter
from pretrain.utils.retry import POLL_S, AbandonedError, RetryTimer

MAX_SMALL_BYTES = 2**28
"""Of a file whose size is not known beforehand: an index or a tokenizer."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemoteShardFile:
    """A file as the index describes it.

    Attributes:
        name: Relative to the remote folder.
        num_bytes: Its size.
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
    """How far a download is, for those who wait for it; `trouble` is the last failure, empty while bytes come."""

    num_bytes: int = 0
    received: int = 0
    trouble: str = ""

    def __str__(self) -> str:
        text = f"{self.received / 2**20:.1f} of {self.num_bytes / 2**20:.1f} MiB"
        return f"{text}, {self.trouble}" if self.trouble else text


def download_once(
    transport: Transport, file: RemoteShardFile, path: Path, *, patience: Patience, abandoned: Callable[[], bool]
) -> None:
    """Makes sure that the bytes of a file are those of the index, whatever is there; fetches it if need be.

    Of several processes and threads that do so at once, one fetches it, while the others wait.

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
            download(transport, file, path, patience=patience, progress=DownloadProgress(), abandoned=abandoned)
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
    transport: Transport,
    file: RemoteShardFile,
    path: Path,
    *,
    patience: Patience,
    progress: DownloadProgress,
    abandoned: Callable[[], bool],
) -> None:
    """Fetches a file; its name appears when its bytes are those of the index and durable.

    Args:
        transport: Of the remote folder.
        file: What to fetch.
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
    for is_last in (False, True):
        writer = AtomicWriter(path)
        try:
            wrong = _receive(transport, file, writer, patience, progress, abandoned)
            if not wrong:
                writer.commit()
                return
        finally:
            writer.discard()
        url = f"{transport.url}/{file.name}"
        if is_last:
            raise DataError(
                f"is not the file of the index: {wrong}, twice", where=url, fix="upload this file again, or the index"
            )
        _log.warning("%s is not the file of the index: %s; fetching it again", url, wrong)


def _receive(
    transport: Transport,
    file: RemoteShardFile,
    writer: AtomicWriter,
    patience: Patience,
    progress: DownloadProgress,
    abandoned: Callable[[], bool],
) -> str:
    """Writes a file's bytes through as many attempts as it takes; returns what is wrong with them, or nothing."""
    hasher = file.hasher()
    attempts = RetryTimer(patience, abandoned)
    progress.num_bytes, progress.received = file.num_bytes, 0
    while progress.received < file.num_bytes:
        try:
            body = transport.open(file.name, progress.received)
            if body.num_bytes not in (None, file.num_bytes):
                return f"it has {body.num_bytes} bytes instead of {file.num_bytes}"
            for piece in body.pieces:
                if abandoned():
                    raise AbandonedError
                if piece:
                    attempts.succeed()
                    progress.trouble = ""
                progress.received += len(piece)
                if progress.received > file.num_bytes:
                    return f"it has more than {file.num_bytes} bytes"
                writer.write(piece)
                hasher.update(piece)
            if progress.received < file.num_bytes:
                raise TransientError(f"broken off after {progress.received} of {file.num_bytes} bytes")
        except TransientError as error:
            progress.trouble = str(error)
            if not attempts.again():
                raise unavailable(f"{transport.url}/{file.name}", error, patience) from None
    found = hasher.hexdigest()
    return "" if found == file.digest else f"its hash is {found} instead of {file.digest}"


def read_small(transport: Transport, name: str, *, patience: Patience, abandoned: Callable[[], bool]) -> bytes:
    """Fetches a file of unknown size into memory.

    Raises:
        DataError: As `download`; or it has more than `MAX_SMALL_BYTES`.
        AbandonedError: It was.
    """
    url, attempts = f"{transport.url}/{name}", RetryTimer(patience, abandoned)
    while True:
        try:
            body = transport.open(name, 0)
            content = b"".join(_limited(body.pieces, url))
            if body.num_bytes not in (None, len(content)):
                raise TransientError(f"broken off after {len(content)} of {body.num_bytes} bytes")
            return content
        except TransientError as error:
            _log.warning("%s: %s; trying again", url, error)
            if not attempts.again():
                raise unavailable(url, error, patience) from None


def unavailable(url: str, error: TransientError, patience: Patience) -> UnavailableError:
    """Returns the error to raise where there is no further attempt."""
    return UnavailableError(
        f"cannot be fetched: {error}, and no answer for {patience.total_s:g} s",
        where=url,
        fix="start again when the server is back",
    )


def _limited(pieces: Iterator[bytes], url: str) -> Iterator[bytes]:
    received = 0
    for piece in pieces:
        received += len(piece)
        if received > MAX_SMALL_BYTES:
            raise DataError(f"has more than {MAX_SMALL_BYTES} bytes", where=url, fix="correct data.path")
        yield piece
