"""Schedules of the learning rate by `optim.schedule.kind`. A new one: a function, a record, and its name in two lines.

cosine, linear   warm-up, then decay to min_ratio at the end
constant         warm-up, then the peak
inverse_sqrt     warm-up, the peak for `hold`, then 1 / sqrt(step), without an end
wsd              warm-up, the peak, and decay over the last `cooldown` steps
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from pretrain.config.base import OFF, Conflicts, OnResume, Section

POSITIONS = ("warmup", "decay", "cooldown", "hold")
"""Positions of a schedule, each of which is given in steps or in tokens."""


class SchedulePositions(Section):
    """Kind and positions of a schedule."""

    kind: Annotated[Literal["cosine", "linear", "constant", "inverse_sqrt", "wsd"], OnResume.WARN] = "cosine"
    """Shape after the warm-up. `inverse_sqrt`: the 2017 Transformer, with `hold` T5. `wsd`:
    warm-up, stable, decay (Hu et al. 2024), to be prolonged from any stable checkpoint."""
    warmup_steps: Annotated[int, OFF, OnResume.WARN] = Field(default=0, ge=0)
    """Length of the linear warm-up from 0, in steps. A run that is not longer has a quarter of its
    steps instead, and a warning."""
    warmup_tokens: Annotated[int | None, OnResume.WARN] = Field(default=None, ge=1)
    """Length of the linear warm-up from 0, in tokens."""
    decay_steps: Annotated[int | None, OnResume.WARN] = Field(default=None, ge=1)
    """Step at which the final learning rate is reached. None: `train.steps`."""
    decay_tokens: Annotated[int | None, OnResume.WARN] = Field(default=None, ge=1)
    """Tokens after which the final learning rate is reached. None: the end of the run."""
    cooldown_steps: Annotated[int | None, OnResume.WARN] = Field(default=None, ge=1)
    """Length of the final decay in steps, for `wsd`; at most what the warm-up leaves of the run."""
    cooldown_tokens: Annotated[int | None, OnResume.WARN] = Field(default=None, ge=1)
    """Length of the final decay in tokens, for `wsd`."""
    cooldown_shape: Annotated[Literal["linear", "1-sqrt"], OnResume.WARN] = "linear"
    """Shape of the decay of `wsd`; `1-sqrt` reaches a lower loss (Haegele et al. 2024)."""
    hold_steps: Annotated[int | None, OnResume.WARN] = Field(default=None, ge=1)
    """Steps at the peak, for `inverse_sqrt`: k in 1 / sqrt(max(n, k)) of T5."""
    hold_tokens: Annotated[int | None, OnResume.WARN] = Field(default=None, ge=1)
    """Tokens at the peak, for `inverse_sqrt`."""
    min_ratio: Annotated[float, OnResume.WARN] = Field(default=0.1, ge=0, le=1)
    """Final learning rate divided by the peak; for `inverse_sqrt` the lower bound."""

    def has(self, position: str) -> bool:
        """Returns whether a position is given."""
        return bool(getattr(self, f"{position}_steps") or getattr(self, f"{position}_tokens"))

    @property
    def is_in_steps(self) -> bool:
        """Whether no position is given in tokens."""
        return all(getattr(self, f"{name}_tokens") is None for name in POSITIONS)

    def factor(self, step: int, total_steps: int) -> float:
        """Returns the learning rate of a step relative to the peak, where all positions are in steps.

        Step 0 is the first. Warm-up is linear: step 0 has factor 1 / warmup_steps (0 would waste the
        step), and step warmup_steps - 1 has factor 1. From there to the end (`decay_steps`, or
        `total_steps`) the factor decays to `min_ratio`, and stays there. `step` may be beyond the end.
        """
        assert self.is_in_steps, "convert positions by token to steps first"
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return SCHEDULES[self.kind].factor(step, self, self.decay_steps or total_steps)

    def _conflicts(self) -> Conflicts:
        # Explicit zeros count as not given: they are the defaults.
        for name in POSITIONS:
            steps, tokens = getattr(self, f"{name}_steps"), getattr(self, f"{name}_tokens")
            if steps and tokens:
                yield f"{name}_steps={steps} and {name}_tokens={tokens} say the same thing", "keep one of them"
        yield from self._kind_conflicts(SCHEDULES[self.kind])
        for unit in ("steps", "tokens"):
            decay, warmup = getattr(self, f"decay_{unit}"), getattr(self, f"warmup_{unit}")
            if decay is not None and decay <= (warmup or 0):
                yield f"decay_{unit}={decay} must exceed warmup_{unit}={warmup}"

    def _kind_conflicts(self, mine: "Schedule") -> Conflicts:
        for name in POSITIONS:
            owners = [kind for kind, schedule in SCHEDULES.items() if schedule.position == name]
            if owners and self.kind not in owners and self.has(name):
                keys = f"{name}_steps and {name}_tokens"
                yield f"{keys} belong to kind={owners[0]}, not {self.kind}", "remove them"
        if self.differs("cooldown_shape") and mine.position != "cooldown":
            yield f"cooldown_shape belongs to kind=wsd, not {self.kind}", "remove it"
        if self.has("decay") and mine.decay is None:
            yield f"decay_steps and decay_tokens mean nothing under kind={self.kind}", "remove them"
        if mine.needs and not any(map(self.has, mine.needs)):
            yield f"kind={self.kind} needs {mine.usual}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A course of the learning rate after the warm-up, as a factor of the peak.

    Attributes:
        decay: (progress, positions) -> remaining share of the decay to `min_ratio`, both from 0 to 1.
            None: it has no end, and reads no `decay`.
        endless: (step, positions in steps) -> factor, of one without an end.
        position: Position that it alone reads.
        needs: Positions, one of which must be given, `usual` ones in the error.
    """

    decay: Callable[[float, SchedulePositions], float] | None = None
    endless: Callable[[int, SchedulePositions], float] | None = None
    position: str = ""
    needs: tuple[str, ...] = ()
    usual: str = ""

    def factor(self, step: int, schedule: SchedulePositions, end: int) -> float:
        """Returns the factor of a step; the decay ends at step `end`, and begins with the cooldown, if there is one."""
        if self.endless is not None:
            return self.endless(step, schedule)
        assert self.decay is not None
        start = max(schedule.warmup_steps, end - (schedule.cooldown_steps or end))
        progress = min(1.0, max(0, step - start) / max(1, end - start))
        return schedule.min_ratio + (1.0 - schedule.min_ratio) * self.decay(progress, schedule)


def _inverse_sqrt(step: int, schedule: SchedulePositions) -> float:
    # 1 up to step number k, counted from 1, then sqrt(k / number); k is the hold or the
    # warm-up. With a warm-up w this is `d_model^-0.5 * min(n^-0.5, n * w^-1.5)` over its peak,
    # (d_model * w)^-0.5 (Vaswani et al. 2017, eq. 3); with a hold k and no warm-up it is T5's
    # `1 / sqrt(max(n, k))` over its peak, 1 / sqrt(k) (Raffel et al. 2020, 3.1.2).
    flat = max(schedule.hold_steps or 0, schedule.warmup_steps)
    return max(schedule.min_ratio, math.sqrt(flat / max(step + 1, flat)))


def _cooldown(progress: float, schedule: SchedulePositions) -> float:
    # Haegele et al. 2024, eq. 1
    return 1.0 - (math.sqrt(progress) if schedule.cooldown_shape == "1-sqrt" else progress)


SCHEDULES: dict[str, Schedule] = {
    # SGDR without restarts (Loshchilov and Hutter 2017, eq. 5).
    "cosine": Schedule(decay=lambda progress, _: 0.5 * (1.0 + math.cos(math.pi * progress))),
    "linear": Schedule(decay=lambda progress, _: 1.0 - progress),
    "constant": Schedule(endless=lambda step, _: 1.0),
    "inverse_sqrt": Schedule(
        endless=_inverse_sqrt,
        position="hold",
        needs=("warmup", "hold"),
        usual="warmup_steps (the 2017 Transformer) or hold_steps=10000 (T5)",
    ),
    "wsd": Schedule(
        decay=_cooldown,
        position="cooldown",
        needs=("cooldown",),
        usual="cooldown_steps or cooldown_tokens; a tenth of the run is usual",
    ),
}
"""Record of each `optim.schedule.kind`."""
