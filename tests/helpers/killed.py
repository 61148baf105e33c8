"""Processes that kill themselves at a chosen durable write: the drill of everything that must survive a kill.

    num_writes = count_writes(write_it, folder, "whole")
    run_killed(write_it, folder, "out", kill_at=17)      # then the same again, without a kill, gives the same bytes

What is called is a function of some module, with its arguments as strings, in a fork of a process that has imported
what takes long.
"""

import importlib
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain.utils.io import set_fault_hook
from tests.helpers.fork_server import ForkServer
from tests.helpers.waiting import wait_until

NEVER = 10**9
_SERVER = ForkServer(
    "pretrain.preparation.convert.convert", "pretrain.preparation.prepare", "pytest", "tests.helpers.killed"
)


class Child:
    """A process that calls a function."""

    def __init__(self, call: dict[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._files = (Path(self._folder.name, "stdout"), Path(self._folder.name, "stderr"))
        self._code: int | None = None
        (self.pid,) = _SERVER.start("tests.helpers.killed:run_child", [call], [self._files])

    def poll(self) -> int | None:
        """Its exit code, negative where a signal has ended it; None while it runs."""
        if self._code is None:
            self._code = _SERVER.poll([self.pid]).get(self.pid)
        return self._code

    def kill(self) -> None:
        """Kills it if it runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> tuple[int, str, str]:
        """Waits for its end; returns the exit code, and what it printed to stdout and to stderr."""
        wait_until(lambda: self.poll() is not None, "the end of a child")
        return self._code, *(path.read_text() for path in self._files)


def start_child(function: Callable[..., object], *arguments: object, kill_at: int = NEVER) -> Child:
    """Starts a process that dies at its `kill_at`-th write; one that does not prints how many it has done, last."""
    name = f"{function.__module__}:{function.__name__}"
    return Child({"function": name, "arguments": [str(argument) for argument in arguments], "kill_at": kill_at})


def count_writes(function: Callable[..., object], *arguments: object) -> int:
    """Runs such a process to its end; returns how many durable writes it has done."""
    code, output, errors = start_child(function, *arguments).end()
    assert code == 0, errors
    return int(output.splitlines()[-1])


def run_killed(function: Callable[..., object], *arguments: object, kill_at: int) -> None:
    """Runs such a process until it has killed itself, which it must."""
    code, _, errors = start_child(function, *arguments, kill_at=kill_at).end()
    assert code == -signal.SIGKILL, errors


def run_child(function: str, arguments: list[str], kill_at: int) -> int:
    """What a child does."""
    num_writes = 0

    def kill(operation: str, path: Path) -> None:
        nonlocal num_writes
        num_writes += 1
        if num_writes == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    set_fault_hook(kill)
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(*arguments)
    print(num_writes)
    return 0
