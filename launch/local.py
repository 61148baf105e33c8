"""Runs the ranks of a job on this machine, and ends them all when one ends badly.

    start N ranks  ->  wait  ->  a signal to us: asked of every rank once, which commit and exit 75
                             ->  a rank that fails: its peers get SIGTERM, after a grace SIGKILL
    exit code: that of the first rank that failed (128 + signal if it was killed), else 75, else 0

Rank 0 shares our terminal; what the others print goes to a log file each, and is quoted when they failed first. A rank
dies with its launcher: the kernel is asked for that (PR_SET_PDEATHSIG), so that not even `kill -9` leaves orphans.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from launch.command import rank_command, rank_environment
from pretrain.errors import EXIT_OK, EXIT_RESUME_ME, LaunchError
from pretrain.io import make_dir

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
POLL_S = 0.05
FAILURE_GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1


def choose_port(port: int | None) -> int:
    """Returns a free port of the loopback interface, `port` itself if it is given.

    Raises:
        LaunchError: `port` is in use.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port or 0))
        except OSError as error:
            reason = error.strerror or str(error)
            raise LaunchError(
                f"port {port} cannot be used: {reason}",
                where="--port",
                fix="give another one, or none to have one chosen",
            ) from None
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Ranks:
    """The processes of one job."""

    def __init__(self, command: list[str], world_size: int, port: int, logs: Path) -> None:
        self.logs = logs
        self.processes: list[subprocess.Popen[bytes]] = []
        self._asked_at: float | None = None
        make_dir(logs)
        for rank in range(world_size):
            environment = rank_environment(os.environ, rank, world_size, port)
            with contextlib.ExitStack() as stack:
                output = None if rank == 0 else stack.enter_context(self.output(rank).open("ab"))
                # A session of its own: a Ctrl-C of the terminal reaches the ranks through us, once.
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=_die_with_parent if sys.platform == "linux" else None,
                )
            self.processes.append(process)

    def output(self, rank: int) -> Path:
        """The file that takes what a rank other than 0 prints."""
        return self.logs / f"rank-{rank:05d}.out"

    def send(self, number: int) -> None:
        """Sends a signal to every rank that still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def wait(self) -> int:
        """Waits for all ranks; returns the job's exit code."""
        first_bad: tuple[int, int] | None = None
        deadline = None
        while True:
            codes = [process.poll() for process in self.processes]
            if first_bad is None:
                bad = [(rank, code) for rank, code in enumerate(codes) if code not in (None, EXIT_OK, EXIT_RESUME_ME)]
                # A killed rank takes its peers along within the same poll; the signal is the cause, not they.
                first_bad = min(bad, key=lambda item: item[1]) if bad else None
                if first_bad:
                    self.send(signal.SIGTERM)
                    deadline = time.monotonic() + FAILURE_GRACE_S
            if all(code is not None for code in codes):
                break
            if deadline is not None and time.monotonic() > deadline:
                self.send(signal.SIGKILL)
            time.sleep(POLL_S)
        if first_bad is not None:
            self._report(*first_bad)
            return _exit_code(first_bad[1])
        return EXIT_RESUME_ME if EXIT_RESUME_ME in codes else EXIT_OK

    def _report(self, rank: int, code: int) -> None:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        if rank or code < 0:
            print(f"launch: rank {rank} {how}", file=sys.stderr)
        if rank and code > 0:
            text = self.output(rank).read_text(encoding="utf-8", errors="replace").strip()
            print(f"launch: its last words, from {self.output(rank)}:", file=sys.stderr)
            print("\n".join(f"  {line}" for line in text.splitlines()[-5:]), file=sys.stderr)


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _forwarding(ranks: list[_Ranks]) -> Iterator[None]:
    """Passes stop signals on to the ranks."""

    def forward(number: int, frame: FrameType | None) -> None:
        for group in ranks:
            group.send(number)

    previous = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def launch_local(config: str, overrides: Sequence[str], num_ranks: int, port: int | None, logs: Path) -> int:
    """Trains `config` on `num_ranks` processes of this machine; returns the job's exit code.

    Args:
        config: Path or built-in name of the config, already checked.
        overrides: `a.b=c` items.
        num_ranks: Processes; with GPUs, one for each.
        port: Of the rendezvous; None: a free one.
        logs: Folder for what ranks other than 0 print.

    Raises:
        LaunchError: The port is in use.
    """
    chosen = choose_port(port)
    group: list[_Ranks] = []
    with _forwarding(group):
        group.append(_Ranks(rank_command(config, overrides), num_ranks, chosen, logs))
        try:
            return group[0].wait()
        finally:
            group[0].send(signal.SIGKILL)
