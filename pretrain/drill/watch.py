"""Kills of a drill, a pure function of (seed, number), and the state of its runs."""

import random
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pretrain.errors import ConfigError
from pretrain.run.folder import RunDir
from pretrain.utils.jsonl import last_row

Phase = Literal["start-up", "steps", "save"]
Target = Literal["rank", "launcher", "all", "any"]
PHASES: tuple[Phase, ...] = get_args(Phase)

_PHASE_WEIGHTS = (1, 2, 1)
_TARGET_WEIGHTS = {"rank": 4, "launcher": 1, "all": 1}


@dataclass(frozen=True, slots=True)
class Kill:
    """One SIGKILL, or several at once. Positions are in [0, 1)."""

    number: int  # from 0
    phase: Phase  # of the attempt
    moment: float  # position in the phase
    jitter: float  # position in the step
    target: str  # a rank, the launcher, or all ranks at once
    victim: float  # position of the rank among all

    def rank_of(self, num_ranks: int) -> int:
        """Returns the rank that is killed."""
        return int(self.victim * num_ranks)

    def describe(self, num_ranks: int) -> str:
        """Returns the target, for people."""
        names = {"rank": f"rank {self.rank_of(num_ranks)}", "all": "all ranks"}
        return names.get(self.target, "the launcher")


def plan_kill(seed: int, number: int, target: Target = "rank") -> Kill:
    """Returns a kill of a drill, independent of earlier kills; `any` draws a target."""
    rng = random.Random(f"{seed}/{number}")
    (phase,) = rng.choices(PHASES, _PHASE_WEIGHTS)
    moment, jitter, victim = (rng.random() for _ in range(3))
    # Drawn for every target, which leaves the moment alone.
    (drawn,) = rng.choices(list(_TARGET_WEIGHTS), list(_TARGET_WEIGHTS.values()))
    return Kill(number, phase, moment, jitter, drawn if target == "any" else target, victim)


def _attempts(run: RunDir) -> list[dict[str, Any]]:
    """Returns the attempts in run.json; none before it exists."""
    with suppress(ConfigError):
        return list(run.read_record()["attempts"])
    return []


class Watch:
    """Observes one attempt from its run folder."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._num_earlier = len(_attempts(run))
        self._leftovers = set(self._temporary())
        self._saving_since: float | None = None
        self.saved = run.newest_step()  # committed at the beginning
        self.begun = time.monotonic()
        self.first_step_s: float | None = None  # since the beginning
        self.longest_save_s = 0.0  # from the first file to the commit

    def step(self) -> int:
        """Returns the last step that this attempt has done; 0 before its first."""
        row = last_row(self._run.audit) or {"step": 0, "attempt": 0}
        if row["attempt"] <= self._num_earlier:
            return 0
        if self.first_step_s is None:
            self.first_step_s = time.monotonic() - self.begun
        return int(row["step"])

    def has_begun_to_save(self) -> bool:
        """Returns whether a save is in progress, or one is done."""
        return self._is_saving() or self._run.newest_step() > self.saved

    def measure(self) -> None:
        """Updates the durations; called often, it measures saves."""
        self.step()
        now = time.monotonic()
        is_saving = self._is_saving()
        if is_saving and self._saving_since is None:
            self._saving_since = now
        elif not is_saving and self._saving_since is not None:
            self.longest_save_s = max(self.longest_save_s, now - self._saving_since)
            self._saving_since = None

    def resumed_from(self) -> int | None:
        """Returns the step that this attempt resumed from; None if it did not get that far."""
        attempts = _attempts(self._run)[self._num_earlier :]
        return int(attempts[-1]["from_step"]) if attempts and "from_step" in attempts[-1] else None

    def _is_saving(self) -> bool:
        return any(path not in self._leftovers for path in self._temporary())

    def _temporary(self) -> list[Path]:
        with suppress(OSError):
            return list(self._run.checkpoints.glob(".tmp-step-*"))
        return []
