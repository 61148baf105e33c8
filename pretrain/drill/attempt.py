"""One attempt at a run of a drill: launched as a user does, killed at its moment, or left to end.

    launch  ->  wait for the moment (start-up, steps, save)  ->  SIGKILL  ->  wait for all processes

Processes are found in /proc by a mark in their environment, which children inherit. The launcher
dies with the drill (PR_SET_PDEATHSIG), so that `kill -9` of the drill leaves nothing either.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from pretrain.drill.drill_folder import DrillFolder, Pace
from pretrain.drill.watch import Kill, Watch
from pretrain.errors import EXIT_OK, LaunchError
from pretrain.utils.io import make_dir
from pretrain.utils.process import die_with, rank_of_process

MARK = "PRETRAIN_DRILL"
GONE_WITHIN_S = 10.0
END_WITHIN_S = 60.0
POLL_S = 0.004
_GONE_POLL_S = 0.05
STEPS_SPREAD = 2  # checkpoint intervals over which kills in steps are spread
SAVE_SPREAD = 2.0  # of the longest save: read-back and retention follow the commit


def check_platform() -> None:
    """Raises LaunchError without /proc."""
    if not sys.platform.startswith("linux"):
        raise LaunchError(
            "the drill finds its processes in /proc, which only Linux has",
            fix="run it on Linux",
        )


def marked(mark: str) -> dict[int, str]:
    """Returns the command line of every live process that carries `mark`, by process id."""
    processes = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # of another user, or gone
            if process.environ().get(MARK) == mark:
                processes[process.pid] = " ".join(process.cmdline())
    return processes


def find_ranks(launcher: int, mark: str) -> dict[int, int]:
    """Returns the process id of each rank that a launcher has started, by rank, without their forks."""
    ranks: dict[int, int] = {}
    waiting = [launcher]
    while waiting:
        for child in _children_of(waiting.pop()):
            environment: dict[str, str] = {}
            with suppress(psutil.Error, OSError):
                environment = psutil.Process(child).environ()
            rank = rank_of_process(child)
            if environment.get(MARK) == mark and rank is not None:
                ranks[rank] = child
            else:
                waiting.append(child)
    return ranks


def _children_of(pid: int) -> list[int]:
    """Returns the children of a process; ten times as fast as psutil, which reads all processes."""
    children: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # a thread that has just ended
                children += map(int, (thread / "children").read_text().split())
    return children


def kill(pids: list[int]) -> None:
    """Sends SIGKILL to each process that still runs."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until_gone(mark: str, timeout_s: float) -> dict[int, str]:
    """Waits until no process carries `mark`; returns those that still do after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while processes := marked(mark):
        if time.monotonic() > deadline:
            return processes
        time.sleep(_GONE_POLL_S)
    return {}


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """Outcome of an attempt."""

    exit_code: int  # of the launcher; negative if it was killed
    is_killed: bool  # by the drill, before it ended well by itself
    saved: tuple[int, int]  # newest committed step before and after
    resumed_from: int | None  # None if it did not get that far
    step: int  # last step done; 0: none
    first_step_s: float | None  # seconds from the start to the first step
    longest_save_s: float  # seconds from the first file of a checkpoint to its commit
    wall_s: float  # seconds from start to end
    gone_s: float  # seconds from the kill to the end of all processes
    left: list[str]  # command lines of processes that had to be killed at the end


class DrillAttempts:
    """Attempts at the two runs of a drill; `mark` is in the environment of all processes."""

    def __init__(self, folder: DrillFolder, mark: str, num_ranks: int) -> None:
        self._folder = folder
        self._mark = mark
        self._num_ranks = num_ranks

    def complete(self, name: str, tell: Callable[[int], None]) -> AttemptOutcome:
        """Runs `name` to its end; `tell` receives the step."""

        def wait(process: subprocess.Popen[bytes], watch: Watch) -> bool:
            while process.poll() is None:
                watch.measure()
                tell(watch.step())
                time.sleep(POLL_S)
            return False

        return self._run(name, wait)

    def killed(self, name: str, plan: Kill, pace: Pace, every_steps: int) -> AttemptOutcome:
        """Runs `name` until the moment of a kill, unless it ends before."""

        def wait(process: subprocess.Popen[bytes], watch: Watch) -> bool:
            for is_now in _moments(plan, watch, pace, every_steps):
                while not is_now():
                    if process.poll() is not None:
                        return False
                    time.sleep(POLL_S)
            return self._kill(process, plan)

        return self._run(name, wait)

    def _kill(self, process: subprocess.Popen[bytes], plan: Kill) -> bool:
        """Kills the target of a plan as soon as it exists; returns whether it did."""
        while process.poll() is None:
            ranks = find_ranks(process.pid, self._mark)
            if plan.target == "launcher":
                victims = [process.pid]
            elif plan.target == "all":
                victims = list(ranks.values()) if len(ranks) == self._num_ranks else []
            else:
                victims = [pid for rank, pid in ranks.items() if rank == plan.rank_of(self._num_ranks)]
            if victims:
                kill(victims)
                return True
            time.sleep(POLL_S)
        return False

    def _run(self, name: str, wait: Callable[[subprocess.Popen[bytes], Watch], bool]) -> AttemptOutcome:
        run = self._folder.run(name)
        watch = Watch(run)
        try:
            process = self._launch(name)
            is_killed = wait(process, watch)
            ended = time.monotonic()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_WITHIN_S)
            survivors = wait_until_gone(self._mark, GONE_WITHIN_S)
        finally:
            # After a Ctrl-C during the launch, only the mark finds the launcher.
            kill(list(marked(self._mark)))
            wait_until_gone(self._mark, GONE_WITHIN_S)
        exit_code = process.wait()
        now = time.monotonic()
        return AttemptOutcome(
            exit_code=exit_code,
            is_killed=is_killed and exit_code != EXIT_OK,
            saved=(watch.saved, run.newest_step()),
            resumed_from=watch.resumed_from(),
            step=watch.step(),
            first_step_s=watch.first_step_s,
            longest_save_s=watch.longest_save_s,
            wall_s=now - watch.begun,
            gone_s=now - ended,
            left=list(survivors.values()),
        )

    def _launch(self, name: str) -> subprocess.Popen[bytes]:
        temporary = make_dir(self._folder.temporary).resolve()
        command = [sys.executable, "-m", "pretrain", "launch", "local", str(self._folder.config(name))]
        # Python discards exceptions of signal handlers in the callbacks of a fork, and so a Ctrl-C.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            with self._folder.log(name).open("ab") as log:
                return subprocess.Popen(
                    [*command, "--ranks", str(self._num_ranks)],
                    env={**os.environ, MARK: self._mark, "TMPDIR": str(temporary)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # a Ctrl-C of the terminal is for the drill
                    preexec_fn=partial(_prepare_launcher, os.getpid(), before),
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare_launcher(parent: int, mask: set[int | signal.Signals]) -> None:
    die_with(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _moments(plan: Kill, watch: Watch, pace: Pace, every_steps: int) -> list[Callable[[], bool]]:
    """Returns the conditions that must become true, one after another, before the kill."""
    if plan.phase == "start-up":
        moment = watch.begun + plan.moment * pace.start_s
        return [lambda: time.monotonic() >= moment or watch.step() > 0]
    if plan.phase == "steps":
        target = watch.saved + 1 + int(plan.moment * STEPS_SPREAD * every_steps)
        return [lambda: watch.step() >= target, _after(plan.jitter * pace.step_s)]
    return [watch.has_begun_to_save, _after(plan.moment * SAVE_SPREAD * pace.save_s)]


def _after(seconds: float) -> Callable[[], bool]:
    """Returns a condition that becomes true so many seconds after its first evaluation."""
    begun: float | None = None

    def is_over() -> bool:
        nonlocal begun
        begun = time.monotonic() if begun is None else begun
        return time.monotonic() - begun >= seconds

    return is_over
