"""From the rows of a run to curves of a bounded size that hide nothing.

    make_curve(points, groups)  ->  at most so many groups of equal width: mean, smallest and largest value of each
    make_course(rows)           ->  tokens and hours by step, for the other x axes

A curve of a month is drawn a few hundred pixels wide. Taking every n-th row would lose the one row with the spike, so
each group keeps its extremes: the line is drawn through the means, a band from the smallest to the largest.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeGuard

PARTS = ("data", "forward", "backward", "optimizer", "communication", "evaluation", "checkpoint", "other")
"""Of a step's time, as `tracking/timeline.py` names them; `data_s` and so on in a row."""
_PART_NAMES = tuple(f"{part}_s" for part in PARTS)
MAX_KNOTS = 300
MAX_LOST_MARKS = 100


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric over x.

    Attributes:
        xs: Of the groups: the mean of their rows'.
        means: Of the groups.
        lows: The smallest value of each; empty where every group is one row.
        highs: The largest.
        lost: x of rows whose value was not finite, the first hundred of them.
        num_rows: With a value.
        num_lost: Without.
    """

    xs: list[float]
    means: list[float]
    lows: list[float]
    highs: list[float]
    lost: list[float]
    num_rows: int
    num_lost: int

    @property
    def is_grouped(self) -> bool:
        """Whether a group may have several rows."""
        return bool(self.lows)


def make_curve(points: Sequence[tuple[float, float]], max_groups: int) -> Curve:
    """Returns a curve with at most `max_groups` groups, each a range of x of the same width.

    Args:
        points: x, never falling, and value; nan is not finite.
        max_groups: At least 1.
    """
    finite = [point for point in points if point[1] == point[1]]  # nan is not itself
    lost = [x for x, value in points if value != value] if len(finite) < len(points) else []
    curve = Curve([], [], [], [], lost[:MAX_LOST_MARKS], len(finite), len(lost))
    if len(finite) <= max_groups:
        return replace(curve, xs=[x for x, _ in finite], means=[value for _, value in finite])
    first, last = finite[0][0], finite[-1][0]
    width = (last - first) / max_groups or 1.0
    for _, group in groupby(finite, lambda point: min(int((point[0] - first) / width), max_groups - 1)):
        xs, values = zip(*group, strict=True)
        curve.xs.append(sum(xs) / len(xs))
        curve.means.append(math.fsum(values) / len(values))
        curve.lows.append(min(values))
        curve.highs.append(max(values))
    return curve


@dataclass(frozen=True, slots=True)
class ProgressCurve:
    """Where a run was at a step: knots, between which it is a straight line.

    Attributes:
        steps: Rising.
        tokens: Trained on by then.
        hours: In the training loop by then; start-up, and what was lost with a crash, are not in it.
    """

    steps: list[float]
    tokens: list[float]
    hours: list[float]

    def hours_at(self, step: float) -> float:
        """Returns the hours at a step; those of the nearest end outside of what is known."""
        return interpolate(self.steps, self.hours, step)

    def tokens_at(self, step: float) -> float:
        """Returns the tokens at a step, in the same way."""
        return interpolate(self.steps, self.tokens, step)

    def thinned(self, max_knots: int = MAX_KNOTS) -> "ProgressCurve":
        """Returns the course with no more knots than that, evenly picked, first and last among them."""
        if len(self.steps) <= max_knots:
            return self
        places = [round(number * (len(self.steps) - 1) / (max_knots - 1)) for number in range(max_knots)]
        return ProgressCurve(*([values[place] for place in places] for values in (self.steps, self.tokens, self.hours)))


def make_course(rows: Sequence[dict[str, Any]]) -> ProgressCurve:
    """Returns the course of a run; a single knot at 0 where rows do not tell.

    Args:
        rows: Of metrics.jsonl, in order of steps.
    """
    course = ProgressCurve([0.0], [0.0], [0.0])
    for row in rows:
        seconds, tokens, passed = seconds_of_step(row), row.get("tokens"), row["step"] - course.steps[-1]
        if seconds is None or not _is_finite(tokens) or passed <= 0:
            continue
        course.steps.append(row["step"])
        course.tokens.append(tokens)
        course.hours.append(course.hours[-1] + passed * seconds / 3600)
    return course


def seconds_of_step(row: dict[str, Any]) -> float | None:
    """Returns how long a step took in the mean since the last row, evaluation and saving included where rows tell."""
    parts = [value for name in _PART_NAMES if _is_finite(value := row.get(name))]
    if parts:
        return math.fsum(parts)
    seconds = row.get("step_time_s")
    return seconds if _is_finite(seconds) else None


def _is_finite(value: Any) -> TypeGuard[float]:
    return type(value) in (float, int) and math.isfinite(value)


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Returns y at x on the line through the points, whose x rise; the nearest end outside of them."""
    if x <= xs[0]:
        return ys[0]
    if x >= xs[-1]:
        return ys[-1]
    high = bisect_right(xs, x)
    low = high - 1
    return ys[low] + (ys[high] - ys[low]) * (x - xs[low]) / (xs[high] - xs[low])


def median(values: Sequence[float]) -> float | None:
    """Returns the upper median of finite values; None where there is none."""
    return sorted(values)[len(values) // 2] if values else None
