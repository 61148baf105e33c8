"""Runs the ranks of a job on this machine, and ends them all when one ends badly.

    start N ranks  ->  wait  ->  a signal to us: asked of every rank once, which commit and exit 75
                             ->  a rank that fails: its peers may fail of the same, then get SIGTERM, then SIGKILL
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
from typing import BinaryIO

from launch.command import rank_command, rank_environment
from pretrain.errors import EXIT_OK, EXIT_RESUME_ME, DiskError, LaunchError
from pretrain.io import make_dir

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
POLL_S = 0.05
SETTLE_S = 1.0
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
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "it must be 0 to 65535"
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

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.processes: list[subprocess.Popen[bytes]] = []
        self.signals: list[int] = []
        """Signals that we got and the ranks did not yet."""

    def start(self, command: list[str], world_size: int, port: int) -> None:
        """Starts every rank. Raises: DiskError where a log file cannot be opened."""
        make_dir(self.logs)
        for rank in range(world_size):
            with contextlib.ExitStack() as stack:
                output = None if rank == 0 else stack.enter_context(self._open_output(rank))
                # A session of its own: a Ctrl-C of the terminal reaches the ranks through us, once.
                process = subprocess.Popen(
                    command,
                    env=rank_environment(os.environ, rank, world_size, port),
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

    def _open_output(self, rank: int) -> BinaryIO:
        try:
            return self.output(rank).open("ab")
        except OSError as error:
            raise DiskError(
                f"cannot be opened: {error.strerror}", where=str(self.output(rank)), fix="correct its permissions"
            ) from None

    def send(self, number: int) -> None:
        """Sends a signal to every rank that still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def wait(self) -> int:
        """Waits for all ranks; returns the job's exit code."""
        failure: tuple[int, int] | None = None
        failed_at = 0.0
        # What fails on one rank mostly fails on all (bad data, a full disk): each may say so before it is ended.
        escalation = [(SETTLE_S, signal.SIGTERM), (SETTLE_S + FAILURE_GRACE_S, signal.SIGKILL)]
        while None in (codes := [process.poll() for process in self.processes]):
            while self.signals:
                self.send(self.signals.pop(0))
            if failure is None and (failure := _find_failure(codes)):
                failed_at = time.monotonic()
            elif failure and escalation and time.monotonic() - failed_at > escalation[0][0]:
                self.send(escalation.pop(0)[1])
            time.sleep(POLL_S)
        failure = failure or _find_failure(codes)
        if failure is None:
            return EXIT_RESUME_ME if EXIT_RESUME_ME in codes else EXIT_OK
        rank, code = failure
        if code < 0 or code != codes[0]:  # else rank 0 has said it on the terminal
            self._report(rank, code)
        return 128 - code if code < 0 else code

    def _report(self, rank: int, code: int) -> None:
        if code < 0:
            print(f"launch: rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr)
            return
        text = self.output(rank).read_text(encoding="utf-8", errors="replace").strip()
        print(f"launch: rank {rank} failed with exit code {code}; the end of {self.output(rank)}:", file=sys.stderr)
        print("\n".join(f"  {line}" for line in text.splitlines()[-5:]), file=sys.stderr)


def _find_failure(codes: Sequence[int | None]) -> tuple[int, int] | None:
    """Returns rank and code of a rank that failed: one ended by a signal first, because its peers fail in its wake."""
    ended = [(rank, code) for rank, code in enumerate(codes) if code is not None]
    failed = [(rank, code) for rank, code in ended if code not in (EXIT_OK, EXIT_RESUME_ME)]
    # Killed, then ended by a second stop signal, then all else.
    return min(failed, key=lambda item: (item[1] >= 0, item[1] <= 128, item[1]), default=None)


@contextlib.contextmanager
def _noting_signals(signals: list[int]) -> Iterator[None]:
    """Appends stop signals to `signals` instead of ending this process."""

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    previous = {number: signal.signal(number, note) for number in STOP_SIGNALS}
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
        DiskError: A log file cannot be written.
    """
    chosen = choose_port(port)
    ranks = _Ranks(logs)
    with _noting_signals(ranks.signals):
        try:
            ranks.start(rank_command(config, overrides), num_ranks, chosen)
            return ranks.wait()
        finally:
            ranks.send(signal.SIGKILL)
