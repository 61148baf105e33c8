"""Standard streams that refuse what is written, and an environment in which Python buffers what it prints.

with broken("full") as descriptor:                   full, unread (a pipe without a reader), gone (a terminal)
    subprocess.Popen(command, stderr=descriptor, env=bare_environment())
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.helpers.fork_server import SOURCE_PATH

KINDS = ("full", "unread", "gone")


@contextmanager
def broken(kind: str) -> Iterator[int]:
    """Gives a descriptor that no write succeeds on."""
    if kind == "full":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        other, descriptor = os.pipe() if kind == "unread" else os.openpty()
        os.close(other)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def bare_environment(**more: str) -> dict[str, str]:
    """Returns what a process needs, and nothing else that a shell may have set."""
    kept = {name: os.environ[name] for name in ("HOME", "PATH", "OMP_NUM_THREADS") if name in os.environ}
    return {**kept, "LANG": "C.UTF-8", "PYTHONPATH": os.pathsep.join([SOURCE_PATH, *sys.path]), **more}
