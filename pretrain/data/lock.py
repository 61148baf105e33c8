"""Who may write a shard folder: one `prepare`, and after it was killed, nobody until its last worker is gone.

    .prepare.lock   held exclusively by the one that runs `prepare`
    .workers.lock   held shared by each worker process; waited for at the start

Both are flocks: the operating system lets go of them when the process ends, however it ends.
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from pretrain.errors import DiskError, LockedError

PREPARE_LOCK = ".prepare.lock"
WORKERS_LOCK = ".workers.lock"
ORPHAN_WAIT_S = 30.0

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Holds the shard folder `folder`, which exists, for one `prepare`.

    Raises:
        LockedError: Another live process has it.
        DiskError: The folder cannot be written.
    """
    try:
        descriptor = os.open(folder / PREPARE_LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        workers = os.open(folder / WORKERS_LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DiskError(
            f"cannot write here: {error.strerror or error}", where=str(folder), fix="free space or fix permissions"
        ) from error
    try:
        if not _flock(descriptor, fcntl.LOCK_EX, wait_s=0):
            owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise LockedError(
                f"another `pretrain prepare` (process {owner}) is writing this folder",
                where=str(folder),
                fix="wait for it to end, or use another --output",
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        if not _flock(workers, fcntl.LOCK_EX, wait_s=ORPHAN_WAIT_S):
            raise LockedError(
                "workers of an earlier `pretrain prepare` are still running", where=str(folder), fix="end them first"
            )
        _flock(workers, fcntl.LOCK_UN, wait_s=0)
        yield
    finally:
        os.close(workers)
        os.close(descriptor)


def hold_as_worker(folder: Path) -> None:
    """Marks this process as a worker on `folder` until it ends."""
    _flock(os.open(folder / WORKERS_LOCK, os.O_RDWR | os.O_CREAT, 0o644), fcntl.LOCK_SH, wait_s=ORPHAN_WAIT_S)


def _flock(descriptor: int, operation: int, wait_s: float) -> bool:
    """Tries for up to `wait_s`; returns whether the lock is had. A file system without locks counts as had."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        except OSError as error:
            _log.warning("this file system has no locks (%s): make sure that nobody else prepares here", error.strerror)
            return True
        else:
            return True
