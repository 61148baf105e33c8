"""Curves of a bounded size from the rows of a run, and its progress in tokens and hours.

A curve of a month is drawn a few hundred pixels wide. Taking every n-th row would lose the one row
with the spike, so rows are grouped and each group keeps its extremes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from pretrain.kinds.objectives import TARGET_COUNTS

PARTS = ("data", "forward", "backward", "optimizer", "communication", "evaluation", "checkpoint", "other")
"""Parts of a step's time, as `tracking/meter.py` names them; `data_s` and so on in a row."""
MAX_LOST_MARKS = 100
MAX_VALUE = 1e150  # and more counts as not finite: sums and axes would overflow


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric over x, in groups of rows. Arrays are float64 [groups]."""

    xs: np.ndarray  # means
    means: np.ndarray
    lows: np.ndarray
    highs: np.ndarray
    lost: np.ndarray  # x of the rows whose value was not finite, at most `MAX_LOST_MARKS`
    num_rows: int  # with a finite value
    num_lost: int  # without one

    @property
    def is_grouped(self) -> bool:
        """Whether a group has several rows."""
        return len(self.xs) < self.num_rows


def make_curve(xs: np.ndarray, values: np.ndarray, max_groups: int) -> Curve:
    """Returns a curve of at most `max_groups` groups of equal width in x, which never falls."""
    is_finite = np.abs(values) < MAX_VALUE
    lost = xs[~is_finite]
    xs = xs[is_finite]
    values = values[is_finite]
    num_rows = len(xs)
    means = lows = highs = values
    if num_rows > max_groups:
        width = (xs[-1] - xs[0]) / max_groups or 1.0
        groups = np.minimum((xs - xs[0]) // width, max_groups - 1)
        first = np.flatnonzero(np.diff(groups, prepend=-1))
        counts = np.diff(first, append=num_rows)
        xs = np.add.reduceat(xs, first) / counts
        means = np.add.reduceat(values, first) / counts
        lows = np.minimum.reduceat(values, first)
        highs = np.maximum.reduceat(values, first)
    return Curve(xs, means, lows, highs, lost[:MAX_LOST_MARKS], num_rows, len(lost))


@dataclass(frozen=True, slots=True)
class ProgressCurve:
    """Progress of a run by step: knots with straight lines between them, constant outside."""

    steps: np.ndarray  # float64 [knots], as are the others
    tokens: np.ndarray  # targets of the loss: labels of a classifier
    hours: np.ndarray  # in the training loop, without start-up and work lost in a crash

    def hours_at(self, steps: Any) -> Any:
        """Returns the hours at a step or an array of steps."""
        return np.interp(steps, self.steps, self.hours)

    def tokens_at(self, steps: Any) -> Any:
        """Returns the tokens at a step or an array of steps."""
        return np.interp(steps, self.steps, self.tokens)


def make_course(rows: Sequence[dict[str, Any]], resumed: Sequence[int] = ()) -> ProgressCurve:
    """Returns the progress of a run from its rows; a single knot at 0 where no row has times.

    A row has the pace since the last one, or since the step at which the run was `resumed`; the
    steps between these two count at the pace of the row before.
    """
    steps, counts, hours = [0.0], [0.0], [0.0]
    pace = None
    for row in rows:
        seconds = seconds_of_step(row)
        tokens = next((row[name] for name in TARGET_COUNTS if name in row), None)
        last = steps[-1]
        if seconds is None or not _is_finite(tokens) or row["step"] <= last:
            continue
        start = max((step for step in resumed if last < step < row["step"]), default=last)
        earlier = (start - last) * (seconds if pace is None else pace)
        pace = seconds
        steps.append(row["step"])
        counts.append(tokens)
        hours.append(hours[-1] + (earlier + (row["step"] - start) * seconds) / 3600)
    # Arrays: a curve of lists would be copied at every question.
    return ProgressCurve(*(np.array(values, dtype=np.float64) for values in (steps, counts, hours)))


def seconds_of_step(row: dict[str, Any]) -> float | None:
    """Returns the mean seconds of a step since the last row, with evaluation and saving if known."""
    parts = [value for part in PARTS if _is_finite(value := row.get(f"{part}_s"))]
    if parts:
        return math.fsum(parts)
    seconds = row.get("step_time_s")
    return seconds if _is_finite(seconds) else None


def _is_finite(value: Any) -> TypeGuard[float]:
    return type(value) in (float, int) and abs(value) < MAX_VALUE
