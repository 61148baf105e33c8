"""Starts ranks on this machine, supervises them, and ends all when one fails.

    start N ranks  ->  wait  ->  a signal to the launcher: passed on; ranks commit and exit 75
                             ->  a failed rank: its peers may fail too, then SIGTERM, then SIGKILL
                             ->  a lost rank under `run.recover`: all are replaced (worlds.py)
                             ->  a rank that was stopped alone: SIGTERM for its peers, after a while
    exit code: that of the rank that failed first (128 + signal if it was killed), else 75, else 0

Rank 0 shares the terminal; the others have a log file each, which is quoted if they failed first.
A rank dies with its launcher (PR_SET_PDEATHSIG), so that `kill -9` leaves no orphans, and its
children end with it (`Janitor`). Stop signals are blocked in a rank until it can answer them.
"""

import contextlib
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import BinaryIO

import psutil

from pretrain.errors import EXIT_HANG, EXIT_RESUME_ME
from pretrain.run.folder import RunDir
from pretrain.run.worlds import Worlds
from pretrain.utils.forked import ForkedRank, fork_rank, is_safe_to_fork, open_files
from pretrain.utils.io import disk_error, make_dir
from pretrain.utils.log import printable
from pretrain.utils.net import reserved_port
from pretrain.utils.process import die_with
from pretrain.utils.units import plural
from pretrain_launch.exits import describe_failure, find_cause, job_code, note_outcome, read_end, reason_of
from pretrain_launch.modes import Meeting, rank_variables

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
POLL_S = 0.05
SETTLE_S = 1.0
FAILURE_GRACE_S = 5.0
HANG_SETTLE_S = 20.0
"""After a hang was found: a rank that can end does so by itself, 15 s for its last words included. A
stopped one cannot, and is killed at once."""
STOPPED_GRACE_S = 25.0
"""After a stop: rank 0 may wait 20 s for wandb; a signal then ends it with the same exit code."""
MAIN_GRACE_S = 5.0
"""Before a recovery: rank 0, whose collectives fail, hands its last rows to the trackers."""
LOOK_POLLS = 20
FROZEN_LOOKS = 5
"""Polls from one look for stopped ranks to the next, and looks in a row that make one a lost one: 5 s,
in which this process was not stopped itself."""


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Place of this machine among the machines of a run that a scheduler starts."""

    nodes: int = 1
    rank: int = 0
    address: str = "127.0.0.1"  # of node 0; all can reach it


ALONE = NodePlace()


def rank_command(config: str, overrides: Sequence[str]) -> list[str]:
    """Returns the argument list that trains `config` as one rank."""
    return [sys.executable, "-m", "pretrain", "train", config, *overrides]


def rank_environment(
    base: Mapping[str, str],
    rank: int,
    world_size: int,
    port: int,
    threads: int | None = None,
    place: NodePlace = ALONE,
) -> dict[str, str]:
    """Adds the variables of torchrun for one rank of a job on this machine to an environment.

    `rank` and `world_size` are those on this machine. `threads` are CPU threads a rank, unless
    OMP_NUM_THREADS is set. None: an even share of the cores.
    """
    share = threads or max(1, (os.cpu_count() or 1) // world_size)
    meeting = Meeting(place.address, port, ("localhost",) * place.nodes, world_size, "local")
    return {
        "OMP_NUM_THREADS": str(share),
        "PYTHONFAULTHANDLER": "1",  # a crash in native code prints the Python stacks
        **base,
        **rank_variables(meeting, place.rank, rank),
    }


class Janitor:
    """A small process that outlives a killed launcher, and ends the children of ranks.

    When its pipe closes, the launcher is gone, and every named process group gets SIGKILL:
    PR_SET_PDEATHSIG does not reach children of a rank (compilers, workers). wandb's service, which
    leaves the group, watches its parent. `memory`: a folder that must not stay either.
    """

    def __init__(self, memory: Path | None = None) -> None:
        reader, self._writer = os.pipe()
        # Signals of a terminal and of Slurm come to whole groups and steps: blocked from the start.
        rest = {*STOP_SIGNALS, signal.SIGUSR2, signal.SIGHUP}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, rest)
        self._pid = os.fork()
        if not self._pid:
            _keep_watch(reader, self._writer, memory)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reader)

    def watch(self, group: int) -> None:
        """Names a process group that must not outlive the launcher."""
        os.write(self._writer, f"{group}\n".encode())

    def dismiss(self) -> None:
        """Ends the janitor: the groups have ended."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._writer)


def end_group(group: int) -> None:
    """Kills the remaining processes of a group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _keep_watch(reader: int, writer: int, memory: Path | None) -> None:
    """Runs the janitor in its fork."""
    os.setsid()  # signals of the terminal or of the launcher's group do not reach it
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
        while memory is not None and memory.exists():  # a rank may write until it has ended
            shutil.rmtree(memory, ignore_errors=True)
    finally:
        os._exit(0)


def _prepare_rank(launcher: int) -> None:
    die_with(launcher)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


RankProcess = subprocess.Popen[bytes] | ForkedRank
_Cause = tuple[int, int] | None


class RankProgram:
    """The start of a rank: as a fork of this process, or as a program of its own.

    `main` is the life of a fork, for which this process has imported everything; None, or where a
    fork would not be safe: `command` is run.
    """

    def __init__(self, command: list[str], main: Callable[[], int] | None) -> None:
        self._command = command
        self._main = main if main and is_safe_to_fork() else None
        self._files = open_files() if self._main else {}

    def start(self, environment: dict[str, str], output: BinaryIO | None) -> RankProcess:
        """Starts a rank in a session of its own: a Ctrl-C reaches it through the launcher, once."""
        prepare = partial(_prepare_rank, os.getpid())
        if self._main:
            return fork_rank(self._main, environment, output, prepare, STOP_SIGNALS, self._files)
        return subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=prepare,
        )


class _Ranks:
    """The processes of one job."""

    def __init__(self, logs: Path, place: NodePlace, worlds: Worlds | None, signals: list[int]) -> None:
        self.logs = logs
        self.place = place
        self._worlds = worlds
        self._stem = "rank-" if place.rank == 0 else f"node-{place.rank:05d}-rank-"
        self.processes: list[RankProcess] = []
        self.ended: dict[int, int] = {}  # codes of ranks in the order of their ends
        self.excused: set[int] = set()  # ranks that this process has ended: their codes say nothing
        self._signals = signals  # those to this process that the ranks have not got yet
        self._was_asked = False
        self._num_polls = 0
        self._seen_stopped: Counter[int] = Counter()  # looks in a row that have seen a rank stopped
        self.lost_at: float | None = None  # when a rank was lost that another world may replace

    def start(self, program: RankProgram, places: Sequence[int], port: int, janitor: Janitor) -> None:
        """Starts a rank at each place. Raises: DiskError if a log file cannot be opened."""
        make_dir(self.logs)
        for rank, local_rank in enumerate(places):
            with contextlib.ExitStack() as stack:
                output = None if rank == 0 else stack.enter_context(self._open_output(rank))
                environment = rank_environment(os.environ, rank, len(places), port, place=self.place)
                environment["LOCAL_RANK"] = str(local_rank)
                if self._worlds is not None:
                    environment |= self._worlds.recovery.variable()
                process = program.start(environment, output)
            self.processes.append(process)
            janitor.watch(process.pid)

    def output(self, rank: int) -> Path:
        """The file with the output of a rank of this machine other than 0."""
        return self.logs / f"{self._stem}{rank:05d}.out"

    def _open_output(self, rank: int) -> BinaryIO:
        path = self.output(rank)
        try:
            return path.open("ab")
        except OSError as error:
            raise disk_error("open", path, error) from None

    def send(self, number: int) -> None:
        """Sends a signal to every rank that still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def end(self) -> None:
        """Kills the ranks that still run, and the processes that ranks have started."""
        self.send(signal.SIGKILL)
        for process in self.processes:
            end_group(process.pid)

    def wait(self) -> tuple[_Cause, int]:
        """Waits for all ranks; returns rank and code of the cause, and the job's exit code."""
        plan: list[tuple[float, int]] = []
        is_failing = is_hung = False
        while len(self.ended) < len(self.processes):
            self._pass_on()
            self._kill_frozen()
            if self._collect() and not is_failing:
                cause = find_cause(self.ended)
                is_failing, is_hung = cause is not None, cause is not None and cause[1] == EXIT_HANG
                plan = self._plan_end() if is_failing or not plan else plan
            if is_hung or self.lost_at is not None:
                self._excuse(signal.SIGKILL, [rank for rank in self._running() if self._is_stopped(rank)])
            if plan and time.monotonic() > plan[0][0]:
                self._excuse(plan.pop(0)[1], self._running())
            time.sleep(POLL_S)
        counted = {rank: code for rank, code in self.ended.items() if rank not in self.excused}
        cause = find_cause(counted)
        return cause, job_code(cause, counted)

    def _pass_on(self) -> None:
        """Sends the ranks the signals that have come."""
        while self._signals:
            self._was_asked = True
            self.send(self._signals.pop(0))

    def report(self, cause: tuple[int, int]) -> None:
        """Prints the failure and the last lines of a rank, unless rank 0 has on the terminal."""
        rank, code = cause
        if code >= 0 and self._main_knows(code):
            return
        is_hung = code == EXIT_HANG and self.lost_at is not None
        print(f"launch: {(self.reason if is_hung else self.describe)(cause)}", file=sys.stderr)
        if rank and (lines := read_end(self.output(rank))):
            print(f"launch: the end of {self.output(rank)}:", file=sys.stderr)
            print("\n".join("  " + printable(line, keep="\t") for line in lines), file=sys.stderr)

    def describe(self, cause: tuple[int, int]) -> str:
        """Returns one line on the rank that caused the end."""
        if self._is_frozen(cause[0]):
            return f"rank {cause[0]} on {socket.gethostname()} was stopped, and killed as a lost one"
        return describe_failure(*cause)

    def reason(self, cause: tuple[int, int]) -> str:
        """Returns the error of the rank that caused the end, else what `describe` does."""
        if self._is_frozen(cause[0]):
            return self.describe(cause)
        return reason_of(cause, self.output(cause[0]))

    def note(self, run: RunDir, cause: _Cause, code: int) -> None:
        """Writes the end of the attempt into run.json if rank 0 has not."""
        reason = self.reason(cause) if cause else "stopped before the first step"
        is_known = cause is None or self._main_knows(code)
        note_outcome(run, self.processes[0].pid, code, reason, is_known=is_known)

    def _main_knows(self, code: int) -> bool:
        """Returns whether rank 0 has said why the job ends: it may know only that it has lost a rank."""
        if self._worlds is not None and code == EXIT_HANG:
            return False
        return code == self.ended.get(0)

    def _running(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.poll() is None]

    def _is_stopped(self, rank: int) -> bool:
        """Returns whether a rank that has not been waited for is stopped (SIGSTOP, a debugger)."""
        return psutil.Process(self.processes[rank].pid).status() == psutil.STATUS_STOPPED

    def _excuse(self, number: int, ranks: Sequence[int]) -> None:
        """Sends a signal that ends ranks."""
        self.excused.update(ranks)
        for rank in ranks:
            self.processes[rank].send_signal(number)

    def _may_follow(self, code: int) -> bool:
        """Returns whether other ranks may take the places of these, after the end of one with `code`."""
        is_asked = self._was_asked or EXIT_RESUME_ME in self.ended.values()
        if self._worlds is None or is_asked:
            return False
        return self._worlds.may_follow(code, self.processes[0].pid)

    def _is_frozen(self, rank: int) -> bool:
        return self._seen_stopped[rank] >= FROZEN_LOOKS

    def _kill_frozen(self) -> None:
        """Kills the ranks that have been stopped for a while."""
        self._num_polls += 1
        if self._worlds is None or self._num_polls % LOOK_POLLS:
            return
        for rank in self._running():
            self._seen_stopped[rank] = self._seen_stopped[rank] + 1 if self._is_stopped(rank) else 0
            if self._is_frozen(rank):
                self.processes[rank].send_signal(signal.SIGKILL)

    def _collect(self) -> bool:
        """Notes the ranks that have ended since; returns whether there are any."""
        num_known = len(self.ended)
        for rank, process in enumerate(self.processes):
            if rank not in self.ended and (code := process.poll()) is not None:
                self.ended[rank] = code
        return len(self.ended) > num_known

    def _plan_end(self) -> list[tuple[float, int]]:
        """Returns times and signals for the ranks that still run, after others have ended."""
        now = time.monotonic()
        cause = find_cause(self.ended)
        if cause is None:
            is_stopped = EXIT_RESUME_ME in self.ended.values()
            return [(now + STOPPED_GRACE_S, signal.SIGTERM)] if is_stopped else []
        if self._may_follow(cause[1]):
            self.lost_at = time.monotonic()
            self._excuse(signal.SIGKILL, [rank for rank in self._running() if rank])
            return [(now + MAIN_GRACE_S, signal.SIGKILL)]
        if cause[1] == EXIT_HANG:
            return [(now + HANG_SETTLE_S, signal.SIGKILL)]
        # Most failures are those of all ranks (bad data, a full disk): each may print it.
        settled = now + SETTLE_S
        return [(settled, signal.SIGTERM), (settled + FAILURE_GRACE_S, signal.SIGKILL)]


@contextlib.contextmanager
def importing(num_ranks: int) -> Iterator[None]:
    """Surrounds imports for forked ranks: the environment of these, and an end at a stop signal."""

    def end(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        said = f"{name}: ended before a rank was started: nothing to save; the same command continues"
        print(said, file=sys.stderr, flush=True)
        os._exit(EXIT_RESUME_ME)

    previous = {number: signal.signal(number, end) for number in STOP_SIGNALS}
    threads = rank_environment(os.environ, 0, num_ranks, 0)["OMP_NUM_THREADS"]
    # Read as libraries are loaded: threads of a rank; no pool of NumPy's, and no context of CUDA,
    # which a fork could not use (torch counts GPUs without one).
    needed = {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": "1"}
    needed |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    added = {name: value for name, value in needed.items() if name not in os.environ}
    os.environ.update(added)
    gc.disable()  # imports leave no garbage
    try:
        yield
    finally:
        gc.enable()
        for name in added:
            os.environ.pop(name, None)
        for number, handler in previous.items():
            signal.signal(number, handler)


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


def launch_local(
    config: str,
    overrides: Sequence[str],
    num_ranks: int,
    port: int | None,
    logs: Path,
    place: NodePlace = ALONE,
    main: Callable[[], int] | None = None,
    worlds: Worlds | None = None,
) -> int:
    """Trains `config`, already checked, on processes of this machine; returns the job's exit code.

    With several nodes `port` is one of node 0, and every node runs this with its own place. `main`
    trains `config` as a rank in a fork of this process; None: ranks are programs. `worlds` decides
    on recoveries; None: a lost rank ends the job.

    Raises:
        LaunchError: The port is in use.
        DiskError: A log file cannot be written.
    """
    program = RankProgram(rank_command(config, overrides), main)
    signals: list[int] = []
    remembering = worlds.memory() if worlds else contextlib.nullcontext()
    with _noting_signals(signals), remembering as memory:
        places = list(range(num_ranks))
        while True:
            ranks = _Ranks(logs, place, worlds, signals)
            cause, code = _live(ranks, program, places, port, memory)
            if worlds is None or cause is None or ranks.lost_at is None:
                return code
            places = worlds.follow(places, cause[0], ranks.reason(cause), ranks.lost_at)
            if not places:
                print("launch: no smaller number of ranks fits the config", file=sys.stderr)
                return code
            said = f"launch: recovery {worlds.recovery.number}, {plural(len(places), 'rank')}"
            print(said, file=sys.stderr)


def _live(
    ranks: _Ranks, program: RankProgram, places: Sequence[int], port: int | None, memory: Path | None
) -> tuple[_Cause, int]:
    """Starts ranks, waits for their end; returns rank and code of the cause, and the job's code."""
    janitor = Janitor(memory)
    # The port of a run on several nodes is one of node 0, and its ranks wait for it.
    reserving = reserved_port(port) if ranks.place.nodes == 1 else contextlib.nullcontext(port or 0)
    with reserving as chosen:
        try:
            ranks.start(program, places, chosen, janitor)
            cause, code = ranks.wait()
            if cause is not None:
                ranks.report(cause)
            if ranks.place.rank == 0:
                ranks.note(RunDir(ranks.logs.parent), cause, code)
            return cause, code
        finally:
            ranks.end()
            janitor.dismiss()
