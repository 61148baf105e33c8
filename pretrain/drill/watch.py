"""Kills of a drill, a pure function of (seed, number), so that it can be repeated and done in parts; its progress."""

import contextlib
import json
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pretrain.checkpoint.format import list_checkpoints, step_of
from pretrain.errors import ConfigError
from pretrain.run.folder import RunDir
from pretrain.utils.log import stderr_console

Phase = Literal["start-up", "steps", "save"]

Target = Literal["rank", "launcher", "all", "any"]

PHASES: tuple[Phase, ...] = get_args(Phase)

_PHASE_WEIGHTS = (1, 2, 1)

_TARGET_WEIGHTS = {"rank": 4, "launcher": 1, "all": 1}


@dataclass(frozen=True, slots=True)
class Kill:
    """One SIGKILL, or several at once.

    Attributes:
        number: Number of the kill, from 0.
        phase: Phase of the attempt: start-up, steps or save.
        moment: Position in the phase, in [0, 1).
        jitter: Position in the step, in [0, 1).
        target: A rank, the launcher, or all ranks at once.
        victim: Position of the rank among all, in [0, 1).
    """

    number: int
    phase: Phase
    moment: float
    jitter: float
    target: str
    victim: float

    def rank_of(self, num_ranks: int) -> int:
        """Returns the rank that is killed, of so many."""
        return int(self.victim * num_ranks)

    def describe(self, num_ranks: int) -> str:
        """Returns what is killed, for people."""
        return {"rank": f"rank {self.rank_of(num_ranks)}", "all": "all ranks"}.get(self.target, "the launcher")


def plan_kill(seed: int, number: int, target: Target = "rank") -> Kill:
    """Returns a kill of the drill with this seed; the same whatever was killed before.

    Args:
        seed: Seed of the drill.
        number: Number of the kill, from 0.
        target: Target; `any` draws one of the three, a rank in two cases of three.
    """
    rng = random.Random(f"{seed}/{number}")
    (phase,) = rng.choices(PHASES, _PHASE_WEIGHTS)
    moment, jitter, victim = rng.random(), rng.random(), rng.random()
    (drawn,) = rng.choices(list(_TARGET_WEIGHTS), list(_TARGET_WEIGHTS.values()))
    return Kill(number, phase, moment, jitter, drawn if target == "any" else target, victim)


# Progress on stderr: a bar in a terminal, plain lines elsewhere.


class DrillProgress:
    """Lines, and the bar of what is being done."""

    def __init__(self, console: Any, bar: Any) -> None:
        self._console, self._bar = console, bar
        self._task: Any = None

    def say(self, text: str) -> None:
        """Prints a line, above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, what: str, total: int) -> None:
        """Starts the bar of `what`."""
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(what, total=total)

    def reach(self, done: int) -> None:
        """Sets the amount done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done)


@contextlib.contextmanager
def show_progress() -> Iterator[DrillProgress]:
    """Gives a progress whose bar vanishes at the end."""
    console = stderr_console()
    if not console.is_terminal:
        yield DrillProgress(console, None)
        return
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True) as bar:
        yield DrillProgress(console, bar)


# State of a run folder during a run: last step, newest checkpoint, save under way.


_TAIL_BYTES = 4096


def newest_step(run: RunDir) -> int:
    """Returns the step of the newest committed checkpoint; 0 where there is none."""
    found = list_checkpoints(run.checkpoints)
    return (step_of(found[-1]) or 0) if found else 0


def last_row(run: RunDir) -> tuple[int, int]:
    """Returns step and attempt of the last whole row of the ledger; zeros where there is none."""
    with suppress(OSError), run.audit.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        whole = file.read().rpartition(b"\n")[0]
        if whole:
            row = json.loads(whole.rpartition(b"\n")[2])
            return int(row["step"]), int(row["attempt"])
    return 0, 0


def attempts(run: RunDir) -> list[dict]:
    """Returns the attempts in run.json; none before it exists."""
    try:
        return list(run.read_record()["attempts"])
    except ConfigError:
        return []


class Watch:
    """Observes one attempt from its run folder.

    Attributes:
        saved: Newest committed step at the beginning.
        begun: Monotonic time of the beginning.
        first_step_s: Seconds from there to the first step; None before.
        longest_save_s: Longest save so far, from the first file to the commit.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._attempts = len(attempts(run))
        self._leftovers = set(self._temporary())
        self._saving_since: float | None = None
        self.saved, self.begun = newest_step(run), time.monotonic()
        self.first_step_s: float | None = None
        self.longest_save_s = 0.0

    def step(self) -> int:
        """Returns the last step that this attempt has done; 0 before its first."""
        step, attempt = last_row(self._run)
        if attempt <= self._attempts:
            return 0
        if self.first_step_s is None:
            self.first_step_s = time.monotonic() - self.begun
        return step

    def has_begun_to_save(self) -> bool:
        """Returns whether a save is under way, or one is done."""
        return self._is_saving() or newest_step(self._run) > self.saved

    def measure(self) -> None:
        """Updates the durations; called often, it measures saves."""
        self.step()
        now, saving = time.monotonic(), self._is_saving()
        if saving and self._saving_since is None:
            self._saving_since = now
        elif not saving and self._saving_since is not None:
            self.longest_save_s = max(self.longest_save_s, now - self._saving_since)
            self._saving_since = None

    def resumed_from(self) -> int | None:
        """Returns the step that this attempt resumed from; None if it did not get that far."""
        found = attempts(self._run)[self._attempts :]
        return int(found[-1]["from_step"]) if found and "from_step" in found[-1] else None

    def _is_saving(self) -> bool:
        return any(path not in self._leftovers for path in self._temporary())

    def _temporary(self) -> list[Path]:
        with suppress(OSError):
            return list(self._run.checkpoints.glob(".tmp-step-*"))
        return []
