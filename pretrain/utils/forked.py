"""A rank as a fork of the launcher, which has imported what ranks need: once, and not once a rank.

    launcher   imports  ->  is_safe_to_fork  ->  fork_rank, for each rank  ->  supervises processes
    rank       own session, streams and environment  ->  main  ->  exit code

A rank begins as if Python had been started for it: stop signals are blocked until it can answer
them, it dies with the launcher, and has none of its files. Its command line stays the launcher's; its
process is named `rank-N`.
"""

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from pretrain.errors import EXIT_BUG
from pretrain.utils.process import name_rank

_TASKS, _FILES = Path("/proc/self/task"), Path("/proc/self/fd")
_ACCELERATORS = ("/dev/nvidia-uvm", "/dev/kfd")
"""Device files that a context of CUDA or ROCm keeps open, which no fork can use."""


class ForkedRank:
    """The part of `subprocess.Popen` that supervises a process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal; None while the process runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def open_files() -> dict[int, str]:
    """Returns the open files of this process by descriptor."""
    files = {}
    for link in _FILES.iterdir():
        with contextlib.suppress(OSError):  # the one of this listing
            files[int(link.name)] = str(link.readlink())
    return files


def is_safe_to_fork() -> bool:
    """Returns whether a fork could do all that this process can: no other thread, no context on a GPU.

    An extension may have either, and a fork has no threads, and would find their locks taken.
    """
    if sys.platform != "linux" or threading.active_count() > 1 or len(list(_TASKS.iterdir())) > 1:
        return False
    return not any(name.startswith(_ACCELERATORS) for name in open_files().values())


def fork_rank(
    main: Callable[[], int],
    environment: Mapping[str, str],
    output: BinaryIO | None,
    prepare: Callable[[], None],
    blocked: Iterable[int],
    keeps: Iterable[int],
) -> ForkedRank:
    """Forks a rank.

    Args:
        main: The program; returns the exit code.
        environment: The whole of its environment.
        output: File of its stdout and stderr; None: those of this process.
        prepare: Called first in it.
        blocked: Signals that it begins with blocked, and that this process handles.
        keeps: Descriptors that imports have opened; further ones are closed in it.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else a fork would print the rest again
    gc.freeze()  # else each fork would copy the pages of all objects
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    pid = os.fork()
    if not pid:
        _live(main, environment, output, prepare, blocked, keeps)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return ForkedRank(pid)


def _live(
    main: Callable[[], int],
    environment: Mapping[str, str],
    output: BinaryIO | None,
    prepare: Callable[[], None],
    blocked: Iterable[int],
    keeps: Iterable[int],
) -> None:
    """The life of a fork, which never returns."""
    code = EXIT_BUG
    try:
        prepare()
        os.setsid()  # a Ctrl-C reaches the ranks through the launcher, once
        for number in blocked:
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if output is not None:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        for number in open_files().keys() - {0, 1, 2, *keeps}:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(number)
        os.environ.clear()
        os.environ.update(environment)
        name_rank(int(environment["RANK"]))
        faulthandler.enable()
        code = main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
