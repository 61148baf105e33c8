"""Starts ranks on this machine, supervises them, and ends all when one fails."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from pretrain.errors import EXIT_HANG, EXIT_RESUME_ME, DiskError
from pretrain.run.folder import RunDir
from pretrain.utils.io import make_dir
from pretrain.utils.net import reserved_port
from pretrain.utils.process import die_with
from pretrain_launch.exits import describe_failure, find_cause, job_code, note_outcome, read_end, reason_of


def rank_command(config: str, overrides: Sequence[str]) -> list[str]:
    """Returns the argument list that trains `config` as one rank."""
    return [sys.executable, "-m", "pretrain", "train", config, *overrides]


def rank_environment(
    base: Mapping[str, str], rank: int, world_size: int, port: int, threads: int | None = None
) -> dict[str, str]:
    """Returns the environment of one rank of a job on this machine, the variables torchrun sets.

    Args:
        base: The launcher's environment.
        rank: Rank to start.
        world_size: Number of ranks.
        port: Rendezvous port on the loopback interface.
        threads: CPU threads a rank, unless OMP_NUM_THREADS is set already; None: an even share of the cores.
    """
    share = threads or max(1, (os.cpu_count() or 1) // world_size)
    return {
        "OMP_NUM_THREADS": str(share),
        "PYTHONFAULTHANDLER": "1",  # a crash in native code prints the Python stacks
        **base,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


# A small process that outlives a killed launcher, and ends what the ranks have started.
#
#     launcher --pipe--> janitor      the pipe closes when the launcher is gone, however it went
#                                     then every process group that was named gets SIGKILL
#
# A rank dies with its launcher by itself (PR_SET_PDEATHSIG), but its children (compilers, workers)
# do not: the kernel clears that wish at each fork. Those that leave the group, like wandb's
# service, watch their parent themselves.


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


# Runs the ranks of a job on this machine, and ends them all when one ends badly.
#
#     start N ranks  ->  wait  ->  a signal to us: asked of every rank once, which commit and exit 75
#                              ->  a rank that fails: its peers may fail of the same, then get SIGTERM, then SIGKILL
#                              ->  a rank that was stopped by itself: so are its peers, unless they end anyway
#     exit code: that of the rank that failed first (128 + signal if it was killed), else 75, else 0
#
# Rank 0 shares our terminal; what the others print goes to a log file each, and is quoted when they
# failed first. A rank dies with its launcher: the kernel is asked for that (PR_SET_PDEATHSIG), so
# that not even `kill -9` leaves orphans; what ranks have started goes with them (`Janitor`). Stop
# signals are held back in a rank until it can answer them.


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

POLL_S = 0.05

SETTLE_S = 1.0

FAILURE_GRACE_S = 5.0

HANG_SETTLE_S = 20.0

"""After a hang was found: every rank that can end does so by itself, however long its last words take on a busy disk,
and what is left is frozen."""

STOPPED_GRACE_S = 25.0

"""After a stop: rank 0 may still wait for wandb, 20 s; a signal then ends it as it would have ended."""


def _prepare_rank(launcher: int) -> None:
    """Runs in a rank before its program."""
    die_with(launcher)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


class _Ranks:
    """The processes of one job."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ended: dict[int, int] = {}
        """Code of each rank that has ended, in the order in which they did."""
        self.signals: list[int] = []
        """Signals that we got and the ranks did not yet."""

    def start(self, command: list[str], world_size: int, port: int, janitor: Janitor) -> None:
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
                    preexec_fn=partial(_prepare_rank, os.getpid()),
                )
            self.processes.append(process)
            janitor.watch(process.pid)

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

    def end(self) -> None:
        """Kills what still runs, and what ranks have started."""
        self.send(signal.SIGKILL)
        for process in self.processes:
            end_group(process.pid)

    def wait(self) -> tuple[tuple[int, int] | None, int]:
        """Waits for all ranks; returns rank and code of the one that failed first, if any, and the job's exit code."""
        plan: list[tuple[float, int]] = []
        is_failing, known = False, None
        while len(self.ended) < len(self.processes):
            while self.signals:
                self.send(self.signals.pop(0))
            if self._collect() and not is_failing:
                is_failing = find_cause(self.ended) is not None
                plan = self._plan_end() if is_failing or not plan else plan
            if plan and time.monotonic() > plan[0][0]:
                known = known or dict(self.ended)  # what ends from here on does so because of us
                self.send(plan.pop(0)[1])
            time.sleep(POLL_S)
        cause = find_cause(known or self.ended)
        return cause, job_code(cause, known or self.ended)

    def report(self, cause: tuple[int, int]) -> None:
        """Says which rank failed and how, and quotes it, unless rank 0 has said it all on the terminal."""
        rank, code = cause
        if code >= 0 and code == self.ended.get(0):
            return
        print(f"launch: {describe_failure(rank, code)}", file=sys.stderr)
        if rank and (lines := read_end(self.output(rank))):
            print(f"launch: the end of {self.output(rank)}:", file=sys.stderr)
            print("\n".join(f"  {line}" for line in lines), file=sys.stderr)

    def note(self, run: RunDir, cause: tuple[int, int] | None, code: int) -> None:
        """Sees to it that run.json says how the attempt ended."""
        reason = reason_of(cause, self.output(cause[0])) if cause else "stopped before the first step"
        # Rank 0 may know only that it has lost a rank, and says so with a code of its own.
        is_known = cause is None or code == self.ended.get(0)
        note_outcome(run, self.processes[0].pid, code, reason, is_known=is_known)

    def _collect(self) -> bool:
        """Notes the ranks that have ended since; returns whether there are any."""
        new = {rank: process.poll() for rank, process in enumerate(self.processes) if rank not in self.ended}
        self.ended |= {rank: code for rank, code in new.items() if code is not None}
        return any(code is not None for code in new.values())

    def _plan_end(self) -> list[tuple[float, int]]:
        """Returns when to send what to the ranks that still run, after some have ended; nothing if those ended well."""
        now, cause = time.monotonic(), find_cause(self.ended)
        if cause is None:
            return [(now + STOPPED_GRACE_S, signal.SIGTERM)] if EXIT_RESUME_ME in self.ended.values() else []
        if cause[1] == EXIT_HANG:
            return [(now + HANG_SETTLE_S, signal.SIGKILL)]
        # What fails on one rank mostly fails on all (bad data, a full disk): each may say so before it is ended.
        return [(now + SETTLE_S, signal.SIGTERM), (now + SETTLE_S + FAILURE_GRACE_S, signal.SIGKILL)]


@contextlib.contextmanager
def _noting_signals(signals: list[int]) -> Iterator[None]:
    """Appends stop signals to `signals` instead of ending this process."""

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    previous = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    previous[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # for the ranks too
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
        port: Rendezvous port; None: a free port.
        logs: Folder for the output of ranks other than 0.

    Raises:
        LaunchError: The port is in use.
        DiskError: A log file cannot be written.
    """
    ranks, janitor = _Ranks(logs), Janitor()
    with reserved_port(port) as chosen, _noting_signals(ranks.signals):
        try:
            ranks.start(rank_command(config, overrides), num_ranks, chosen, janitor)
            cause, code = ranks.wait()
            if cause is not None:
                ranks.report(cause)
            ranks.note(RunDir(logs.parent), cause, code)
            return code
        finally:
            ranks.end()
            janitor.dismiss()
