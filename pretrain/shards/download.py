"""Downloads of single files: resumed, verified, and visible only when they are whole.

    attempt -> pieces -> hash and AtomicWriter    broken off: wait, continue by range (utils/remote.py)
            -> the hash is that of the index: fsync, rename     otherwise: removed, fetched once more

Threads and their order are in fetch.py, the target folder in cache.py.
"""

import errno
import hashlib
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.errors import DataError
from pretrain.shards.cache import try_lock
from pretrain.shards.index import ShardFile
from pretrain.shards.store import Patience, UnavailableError
from pretrain.utils.io import AtomicWriter
from pretrain.utils.remote import PIECE_BYTES, POLL_S, AbandonedError, RemoteAttempts, call_remote, open_url

# Bytes that one request of s3 or gs asks for.
RANGE_BYTES = 2**23
# Limit of a file whose size is not known beforehand: an index or a tokenizer.
MAX_SMALL_BYTES = 2**28

_log = logging.getLogger(__name__)


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
    source: str, file: ShardFile, path: Path, *, patience: Patience, abandoned: Callable[[], bool]
) -> None:
    """Fetches a file unless its bytes are right, in one process of several. See `download`."""
    lock_path = path.with_name(f"{path.name}.lock")
    while (descriptor := try_lock(lock_path)) is None:
        if abandoned():
            raise AbandonedError
        time.sleep(POLL_S)
    try:
        if not _is_whole(path, file):
            for leftover in path.parent.glob(f"{path.name}.tmp-*"):
                leftover.unlink(missing_ok=True)  # of a process that died: we have the lock
            download(source, file, path, patience=patience, progress=DownloadProgress(), abandoned=abandoned)
    finally:
        lock_path.unlink(missing_ok=True)
        os.close(descriptor)


def _is_whole(path: Path, file: ShardFile) -> bool:
    """Returns whether a file has the size and the hash that the index says."""
    hasher = _hasher(file)
    try:
        if path.stat().st_size != file.num_bytes:
            return False
        with path.open("rb") as opened:
            while piece := opened.read(PIECE_BYTES):
                hasher.update(piece)
    except OSError:
        return False
    return hasher.hexdigest() == file.digest


def _hasher(file: ShardFile) -> Any:
    return hashlib.sha256() if len(file.digest) == 64 else _Crc32()


class _Crc32:
    """CRC32 with the interface of hashlib."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, piece: bytes) -> None:
        self._value = zlib.crc32(piece, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def download(
    source: str,
    file: ShardFile,
    path: Path,
    *,
    patience: Patience,
    progress: DownloadProgress,
    abandoned: Callable[[], bool],
) -> None:
    """Fetches a file of an address; it appears as `path` when its bytes are the index's, and durable.

    `abandoned` is asked between pieces and while waiting; `progress` is kept up to date.

    Raises:
        DataError: The server has another file, or not this one.
        UnavailableError: The server has been away for too long, or forbids it.
        DiskError: The disk refused.
        AbandonedError: `abandoned` said so.
    """
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
    file: ShardFile,
    writer: AtomicWriter,
    patience: Patience,
    progress: DownloadProgress,
    abandoned: Callable[[], bool],
) -> str:
    """Downloads in as many attempts as it takes; returns what is wrong, or nothing."""
    hasher = _hasher(file)
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
    digest = hasher.hexdigest()
    return "" if digest == file.digest else f"its hash is {digest} instead of {file.digest}"


def read_small(url: str, *, patience: Patience, abandoned: Callable[[], bool]) -> bytes:
    """Fetches a file of up to `MAX_SMALL_BYTES` into memory. Raises: DataError, AbandonedError."""
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
        fix = "correct the address (data.path of a config), or give access to it"
        if error.errno == errno.EIO:
            fix = "start again when the server is back"
        raise kind(f"cannot be fetched: {error.strerror}", where=str(error.filename), fix=fix) from None
