"""Curves of a bounded size from the rows of a run, and its progress in tokens and hours.

A curve of a month is drawn a few hundred pixels wide. Taking every n-th row would lose the one row
with the spike, so rows are grouped and each group keeps its extremes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pretrain.kinds.objectives import TARGET_COUNTS
from pretrain.report.metric_columns import MetricTable

PARTS = ("data", "forward", "backward", "optimizer", "communication", "evaluation", "checkpoint", "other")
"""Parts of a step's time, as `tracking/meter.py` names them; `data_s` and so on in a row."""
MAX_LOST_MARKS = 100
MAX_KNOTS = 2**16
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
    if len(lost):
        xs = xs[is_finite]
        values = values[is_finite]
    num_rows = len(xs)
    means = lows = highs = values
    if num_rows > max_groups:
        # Bounds are searched, since a group number of each row costs more than all else.
        bounds = np.linspace(xs[0], xs[-1], max_groups, endpoint=False)
        first = np.unique(np.searchsorted(xs, bounds))
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


def make_course(tables: Sequence[MetricTable], resumed: Sequence[int] = ()) -> ProgressCurve:
    """Returns the progress of a run from its rows; a single knot at 0 where no row has times.

    A row has the pace since the last one, or since the step at which the run was `resumed`; the
    steps between these two count at the pace of the row before. A run of more than `MAX_KNOTS` rows
    has knots at some of them, as evenly as numbers are.
    """
    timed = [knots for table in tables if (knots := _knots(table)) is not None]
    steps = tokens = hours = np.empty(0)
    if timed:
        numbers, *columns = zip(*timed, strict=True)
        order = np.argsort(np.concatenate(numbers), kind="stable")
        steps, tokens, seconds = (np.concatenate(parts)[order] for parts in columns)
        del timed, numbers, columns, order  # of a long run tens of megabytes
        highest = np.maximum.accumulate(steps)
        is_new = np.diff(highest, prepend=0.0) > 0  # one row a step
        del highest
        steps = steps[is_new]
        tokens = tokens[is_new]
        hours = _count_hours(steps, seconds[is_new], resumed)
    chosen = np.arange(len(steps))
    if len(steps) > MAX_KNOTS:
        chosen = np.linspace(0, len(steps) - 1, MAX_KNOTS).astype(np.int64)
    return ProgressCurve(*(np.concatenate([[0.0], values[chosen]]) for values in (steps, tokens, hours)))


def _count_hours(steps: np.ndarray, seconds: np.ndarray, resumed: Sequence[int]) -> np.ndarray:
    """Returns the hours of a run at steps, from the seconds a step since the ones before."""
    before = np.concatenate([[0.0], steps[:-1]])
    begun = np.sort([0.0, *resumed])
    start = np.maximum(before, begun[np.searchsorted(begun, steps) - 1])
    hours = (steps - start) * seconds
    hours[1:] += (start - before)[1:] * seconds[:-1]
    hours[:1] += start[:1] * seconds[:1]
    hours /= 3600
    return np.cumsum(hours, out=hours)


def _knots(table: MetricTable) -> tuple[np.ndarray, ...] | None:
    """Returns numbers, steps, tokens and seconds a step of timed rows; None: the table has none."""
    seconds = seconds_of_step(table.columns)
    tokens = next((table.columns[name] for name in TARGET_COUNTS if name in table.columns), None)
    if seconds is None or tokens is None:
        return None
    is_timed = np.abs(seconds) < MAX_VALUE
    is_timed &= np.abs(tokens) < MAX_VALUE
    columns = (table.numbers, table.steps, tokens, seconds)
    return tuple(column[is_timed] for column in columns)


def seconds_of_step(columns: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Returns the mean seconds of a step since the last row, with evaluation and saving if known.

    nan in a row without a time; None without a column of any.
    """
    whole = columns.get("step_time_s")
    parts = [columns[name] for part in PARTS if (name := f"{part}_s") in columns]
    if not parts:
        return whole
    total = np.zeros(parts[0].shape, dtype=np.longdouble)  # 0.6 + 1.2 + 0.2 is 2
    is_split = np.zeros(total.shape, dtype=bool)
    for part in parts:
        is_timed = np.abs(part) < MAX_VALUE
        total[is_timed] += part[is_timed]
        is_split |= is_timed
    return np.where(is_split, total.astype(np.float64), np.nan if whole is None else whole)
