"""File locks that end with the process that has them, however it ends.

A lock is a flock on a file of its own, and lives as long as the descriptor that it was taken with. Who has a lock for
itself may remove its file; whoever waited for it then finds out and takes the lock of the new file.
"""

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from pretrain.errors import DiskError


class LockSet:
    """Exclusive locks of some shards, let go of together."""

    def __init__(self) -> None:
        self.paths: dict[str, list[Path]] = {}
        self._descriptors: list[int] = []

    def __enter__(self) -> "LockSet":
        return self

    def __exit__(self, *_: object) -> None:
        _close(self._descriptors)

    def add(self, key: str, paths: list[Path]) -> bool:
        """Locks all of a shard's files or none; returns whether it did."""
        taken: list[int] = []
        for path in paths:
            descriptor = try_lock(path, fcntl.LOCK_EX)
            if descriptor is None:
                _close(taken)
                return False
            taken.append(descriptor)
        self.paths[key] = paths
        self._descriptors += taken
        return True


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def try_lock(path: Path, operation: int) -> int | None:
    """Returns a descriptor that has a lock until it is closed; None where another has it."""
    try:
        return lock(path, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return None


def lock(path: Path, operation: int = fcntl.LOCK_EX) -> int:
    """Waits for a lock, of a file that is made if need be, and returns a descriptor that has it until it is closed.

    Raises:
        BlockingIOError: With LOCK_NB: another has it.
        DiskError: The disk refused, or has no locks.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise _disk_error(path, error) from error
        try:
            fcntl.flock(descriptor, operation)
            # Who has a lock may remove its file: then the lock that we waited for guards nothing.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError as error:
            os.close(descriptor)
            raise _disk_error(path, error) from error
        os.close(descriptor)


def _disk_error(path: Path, error: OSError) -> DiskError:
    return DiskError(
        f"cannot lock here: {error.strerror or error}",
        where=str(path),
        fix="set data.cache_dir to a folder on a disk of this machine",
    )
