"""Lock files of the cache, released when their process ends.

A lock lives as long as its descriptor. The owner of an exclusive lock may remove the file;
processes that waited for it notice, and take the lock of the new file.
"""

import fcntl
import math
import os
from collections.abc import Iterable
from pathlib import Path

from pretrain.errors import DiskError
from pretrain.utils.io import take_flock


class LockSet:
    """Exclusive locks of several shards, released together."""

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


def lock(path: Path, operation: int = fcntl.LOCK_EX) -> int:
    """Waits for the lock of a file, made if need be; closing the descriptor releases it.

    Raises:
        DiskError: The disk refused, or has no locks.
    """
    descriptor = try_lock(path, operation, wait_s=math.inf)
    assert descriptor is not None
    return descriptor


def try_lock(path: Path, operation: int, wait_s: float = 0.0) -> int | None:
    """As `lock`; returns None where another process has it after `wait_s` seconds."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise _disk_error(path, error) from error
        try:
            if not take_flock(descriptor, operation, wait_s):
                os.close(descriptor)
                return None
            # The owner may have removed the file meanwhile: then this lock guards nothing.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass
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
