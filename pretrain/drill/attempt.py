"""One attempt at a run of a drill: launched as a user does, killed at its moment, or left to end.

    launch  ->  wait for the moment (start-up | steps | save)  ->  SIGKILL  ->  wait until all its processes are gone

Processes are found in /proc by a mark in their environment, which children inherit and which survives the death of a
parent. The launcher dies with the drill (PR_SET_PDEATHSIG), so that `kill -9` of the drill leaves nothing either.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pretrain.drill.drill_folder import DrillFolder, Pace
from pretrain.drill.watch import Kill, Watch, last_row, newest_step
from pretrain.errors import EXIT_OK, LaunchError
from pretrain.utils.io import make_dir
from pretrain.utils.process import die_with

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
    """Sends SIGKILL to each process that still runs."""
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


POLL_S = 0.004

GONE_WITHIN_S = 10.0

END_WITHIN_S = 60.0

STEPS_SPREAD = 2

"""Checkpoint intervals over which kills in steps are spread: before the next commit and after it."""

SAVE_SPREAD = 2.0

"""Kills in a save are spread over this multiple of the longest save: read-back and retention follow the commit."""


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """Outcome of an attempt.

    Attributes:
        exit_code: Exit code of the launcher; negative if it was killed.
        is_killed: Whether the drill killed it, before it ended well by itself.
        saved: Newest committed step before and after it.
        resumed_from: Step that it resumed from; None if it did not get that far.
        step: Last step done; 0: none.
        first_step_s: Seconds from its start to its first step; None without one.
        longest_save_s: Seconds from the first file of a checkpoint to its commit.
        wall_s: Seconds from its start to its end.
        gone_s: Seconds from the kill until all its processes were gone.
        left: Command lines of processes that had to be killed at the end.
    """

    exit_code: int
    is_killed: bool
    saved: tuple[int, int]
    resumed_from: int | None
    step: int
    first_step_s: float | None
    longest_save_s: float
    wall_s: float
    gone_s: float
    left: list[str]


class DrillAttempts:
    """Attempts at the two runs of a drill.

    Args:
        folder: Folder of the drill.
        mark: Value of PRETRAIN_DRILL in the environment of all its processes.
        num_ranks: Ranks of a run.
    """

    def __init__(self, folder: DrillFolder, mark: str, num_ranks: int) -> None:
        self._folder, self._mark, self._num_ranks = folder, mark, num_ranks

    def complete(self, name: str, tell: Callable[[int], None]) -> AttemptOutcome:
        """Runs `name` to its end; `tell` receives the step."""

        def wait(process: subprocess.Popen[bytes], watch: Watch) -> bool:
            while process.poll() is None:
                watch.measure()
                tell(last_row(self._folder.run(name))[0])
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
        """Kills what the plan names, as soon as it is there; returns whether it was."""
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
            left = wait_until_gone(self._mark, GONE_WITHIN_S)
        finally:  # also where a Ctrl-C falls into the launch: the mark finds what `process` does not name yet
            kill(list(marked(self._mark)))
            wait_until_gone(self._mark, GONE_WITHIN_S)
        exit_code = process.wait()
        now = time.monotonic()
        return AttemptOutcome(
            exit_code=exit_code,
            is_killed=is_killed and exit_code != EXIT_OK,
            saved=(watch.saved, newest_step(run)),
            resumed_from=watch.resumed_from(),
            step=watch.step(),
            first_step_s=watch.first_step_s,
            longest_save_s=watch.longest_save_s,
            wall_s=now - watch.begun,
            gone_s=now - ended,
            left=list(left.values()),
        )

    def _launch(self, name: str) -> subprocess.Popen[bytes]:
        temporary = make_dir(self._folder.temporary)
        command = [sys.executable, "-m", "pretrain", "launch", "local"]
        # Python discards what a signal handler raises in the callbacks of a fork: a Ctrl-C would be lost there.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            with self._folder.log(name).open("ab") as log:
                return subprocess.Popen(
                    [*command, str(self._folder.config(name)), "--ranks", str(self._num_ranks)],
                    env={**os.environ, MARK: self._mark, "TMPDIR": str(temporary.resolve())},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # a Ctrl-C of the terminal is for the drill
                    preexec_fn=partial(_prepare_launcher, os.getpid(), before),
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare_launcher(parent: int, mask: set[int | signal.Signals]) -> None:
    """Runs in the launcher's process before its program."""
    die_with(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _moments(plan: Kill, watch: Watch, pace: Pace, every_steps: int) -> list[Callable[[], bool]]:
    """Returns what has to come true, one after another, before the kill."""
    if plan.phase == "start-up":
        return [lambda: _past(watch.begun, plan.moment * pace.start_s) or watch.step() > 0]
    if plan.phase == "steps":
        target, pause_s = watch.saved + 1 + int(plan.moment * STEPS_SPREAD * every_steps), plan.jitter * pace.step_s
        return [lambda: watch.step() >= target, _after(pause_s)]
    return [watch.has_begun_to_save, _after(plan.moment * SAVE_SPREAD * pace.save_s)]


def _past(begun: float, seconds: float) -> bool:
    return time.monotonic() - begun >= seconds


def _after(seconds: float) -> Callable[[], bool]:
    """Returns what comes true so many seconds after it was asked first."""
    begun: list[float] = []

    def is_over() -> bool:
        begun.append(time.monotonic())
        return _past(begun[0], seconds)

    return is_over
