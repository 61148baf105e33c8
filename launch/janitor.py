"""A small process that outlives a killed launcher, and ends what the ranks have started.

    launcher --pipe--> janitor      the pipe closes when the launcher is gone, however it went
                                    then every process group that was named gets SIGKILL

A rank dies with its launcher by itself (PR_SET_PDEATHSIG), but its children (compilers, workers) do not: the kernel
clears that wish at each fork. Those that leave the group, like wandb's service, watch their parent themselves.
"""

import contextlib
import os
import signal

_NOT_ITS_OWN = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP}
"""Blocked in a janitor from its first moment on: those of a terminal and of Slurm come to whole groups and steps."""


class Janitor:
    """Ends process groups when this process is gone."""

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_ITS_OWN)
        self._pid = os.fork()
        if not self._pid:
            _keep_watch(reader, self._writer)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reader)

    def watch(self, group: int) -> None:
        """Names a process group that must not outlive us."""
        os.write(self._writer, f"{group}\n".encode())

    def dismiss(self) -> None:
        """Ends it: the groups are dealt with."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._writer)


def end_group(group: int) -> None:
    """Kills what is left of a process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _keep_watch(reader: int, writer: int) -> None:
    """The life of the janitor, in its fork."""
    os.setsid()  # no signal of the terminal or of the launcher's group is for it
    os.close(writer)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    try:
        named = b""
        while piece := os.read(reader, 4096):
            named += piece
        for group in named.split():
            end_group(int(group))
    finally:
        os._exit(0)
