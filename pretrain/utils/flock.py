"""File locks that the operating system lets go of when the process that has them ends, however it ends."""

import fcntl
import time

LOOK_EVERY_S = 0.02


def take_flock(descriptor: int, operation: int = fcntl.LOCK_EX, wait_s: float = 0.0) -> bool:
    """Tries to lock an open file for up to `wait_s` seconds; returns whether it is locked.

    Args:
        descriptor: Of the file; the lock lives as long as it does.
        operation: LOCK_EX, LOCK_SH, or LOCK_UN to let go of it.
        wait_s: 0 tries once.

    Raises:
        OSError: The file system has no locks.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_EVERY_S)
        else:
            return True
