"""Who may write a shard folder: one `prepare`, or one for each part of n; and after a kill, nobody until the last
worker is gone.

    .prepare.lock      held exclusively by the one that runs `prepare`; shared, with n in it, by those of `--part i/n`
    .prepare-i.lock    held exclusively by `--part i/n`
    .workers.lock, .workers-i.lock    held shared by each worker process; waited for at the start
    .claim.lock        held for a moment by whoever writes what all share: the n above, prepare.json, the index

All are flocks: the operating system lets go of them when the process ends, however it ends.
"""

import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from pretrain.errors import DiskError, LockedError
from pretrain.prepare.share import WHOLE, Share
from pretrain.utils.flock import take_flock

PREPARE_LOCK = ".prepare.lock"
WORKERS_LOCK = ".workers.lock"
CLAIM_LOCK = ".claim.lock"
ORPHAN_WAIT_S = 30.0
CLAIM_WAIT_S = 600.0
_LOCK_NAME = re.compile(r"\.(prepare|workers|claim)(-\d+)?\.lock")

_log = logging.getLogger(__name__)


def is_lock(name: str) -> bool:
    """Whether a file of a shard folder is one of these."""
    return _LOCK_NAME.fullmatch(name) is not None


@contextlib.contextmanager
def lock_folder(folder: Path, share: Share = WHOLE) -> Iterator[None]:
    """Holds the shard folder `folder`, which exists, for one `prepare`, or for one share of it.

    Raises:
        LockedError: Another live process has it.
        DiskError: The folder cannot be written.
    """
    with contextlib.ExitStack() as stack:
        descriptor = _open(folder, PREPARE_LOCK, stack)
        if share.is_whole:
            _hold(descriptor, folder, "another `pretrain prepare`")
        else:
            _hold_with_others(descriptor, folder, share)
            _hold(_open(folder, f".prepare-{share.number}.lock", stack), folder, f"another `--part {share}`")
        names = {WORKERS_LOCK, _workers_name(share)}
        if share.is_whole:
            names |= {path.name for path in folder.glob(".workers-*.lock")}
        for name in sorted(names):
            workers = _open(folder, name, stack)
            if not _flock(workers, fcntl.LOCK_EX, wait_s=ORPHAN_WAIT_S):
                what = "workers of an earlier `pretrain prepare` are still running"
                raise LockedError(what, where=str(folder), fix="end them first")
            _flock(workers, fcntl.LOCK_UN, wait_s=0)
        yield


@contextlib.contextmanager
def claim_lock(folder: Path) -> Iterator[None]:
    """Holds what the shares of a folder write in common. Raises: LockedError, DiskError."""
    with contextlib.ExitStack() as stack:
        if not _flock(_open(folder, CLAIM_LOCK, stack), fcntl.LOCK_EX, wait_s=CLAIM_WAIT_S):
            raise LockedError(f"{CLAIM_LOCK} is held for too long", where=str(folder), fix="end what holds it")
        yield


def hold_as_worker(folder: Path, share: Share = WHOLE) -> None:
    """Marks this process as a worker on `folder` until it ends."""
    name = _workers_name(share)
    _flock(os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644), fcntl.LOCK_SH, wait_s=ORPHAN_WAIT_S)


def _workers_name(share: Share) -> str:
    return WORKERS_LOCK if share.is_whole else f".workers-{share.number}.lock"


def _open(folder: Path, name: str, stack: contextlib.ExitStack) -> int:
    try:
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DiskError(
            f"cannot write here: {error.strerror or error}", where=str(folder), fix="free space or fix permissions"
        ) from error
    stack.callback(os.close, descriptor)
    return descriptor


def _hold(descriptor: int, folder: Path, who: str) -> None:
    if not _flock(descriptor, fcntl.LOCK_EX, wait_s=0):
        raise _taken(descriptor, folder, who)
    _write_owner(descriptor, str(os.getpid()))


def _hold_with_others(descriptor: int, folder: Path, share: Share) -> None:
    """Shares the folder with other parts of the same n: parts of another n would write the same files."""
    mine = f"of {share.of}"
    # One that comes first holds it exclusively until it has written its n: the others wait here for as long.
    with claim_lock(folder):
        if _flock(descriptor, fcntl.LOCK_EX, wait_s=0):
            _write_owner(descriptor, mine)
        if not _flock(descriptor, fcntl.LOCK_SH, wait_s=0):
            raise _taken(descriptor, folder, "another `pretrain prepare`")
    if (owner := _read_owner(descriptor)) != mine:
        raise LockedError(
            f"`--part {share}` does not go with the parts {owner} that are being prepared here",
            where=str(folder),
            fix="use the same n for all, or wait for them to end",
        )


def _taken(descriptor: int, folder: Path, who: str) -> LockedError:
    owner = _read_owner(descriptor)
    named = f"parts {owner}" if owner.startswith("of ") else f"process {owner or 'unknown'}"
    return LockedError(
        f"{who} ({named}) is writing this folder",
        where=str(folder),
        fix="wait for it to end, or use another --output",
    )


def _read_owner(descriptor: int) -> str:
    return os.pread(descriptor, 32, 0).decode(errors="replace").strip()


def _write_owner(descriptor: int, owner: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{owner}\n".encode(), 0)


def _flock(descriptor: int, operation: int, wait_s: float) -> bool:
    """Tries for up to `wait_s`; returns whether the lock is had. A file system without locks counts as had."""
    try:
        return take_flock(descriptor, operation, wait_s)
    except OSError as error:
        _log.warning("this file system has no locks (%s): make sure that nobody else prepares here", error.strerror)
        return True
