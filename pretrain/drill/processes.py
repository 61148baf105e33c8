"""Which processes belong to a drill, by /proc: those that carry its mark in their environment, ranks among them.

A mark is inherited by whatever a launcher, its ranks and their workers start, and survives the death of a parent, so
that what is left behind is found wherever it hangs in the tree.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pretrain.errors import LaunchError

MARK = "PRETRAIN_DRILL"
_POLL_S = 0.02


def check_platform() -> None:
    """Raises LaunchError where there is no /proc."""
    if not sys.platform.startswith("linux"):
        raise LaunchError("the drill finds its processes in /proc, which only Linux has", fix="run it on Linux")


def marked(mark: str) -> dict[int, str]:
    """Returns the command line of every live process that carries `mark`, by process id."""
    return {pid: _command_of(pid) for pid in _pids() if f"{MARK}={mark}".encode() in _environment_of(pid)}


def find_ranks(launcher: int, mark: str) -> dict[int, int]:
    """Returns the process id of each rank that a launcher has started so far, by rank.

    What a rank has forked carries the same RANK: the rank is the one whose parent does not.
    """
    found: dict[int, int] = {}
    waiting = [launcher]
    while waiting:
        for child in _children_of(waiting.pop()):
            environment = _environment_of(child)
            ranks = [item[5:] for item in environment if item.startswith(b"RANK=")]
            if ranks and f"{MARK}={mark}".encode() in environment:
                found[int(ranks[0])] = child
            else:
                waiting.append(child)
    return found


def kill(pids: list[int]) -> None:
    """Sends SIGKILL to each; one that has just ended is as good."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until_gone(mark: str, timeout_s: float) -> dict[int, str]:
    """Waits until no process carries `mark`; returns those that still do after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while left := marked(mark):
        if time.monotonic() > deadline:
            return left
        time.sleep(_POLL_S)
    return {}


def _pids() -> Iterator[int]:
    yield from (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())


def _environment_of(pid: int) -> list[bytes]:
    """The environment that a process was started with; empty where it is another user's, a zombie, or gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def _command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _children_of(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # a thread that has just ended: its children are another's, or gone
                found += map(int, (thread / "children").read_text().split())
    return found
