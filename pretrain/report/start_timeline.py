"""A run by the clock: its starts as bars in the colour of their outcome, under throughput, data wait and checkpoints.

    place_starts(run)   ->  hours of each start since the first began, and its outcome
    place_points(...)   ->  the points of each start, by the hour
    draw_timeline(run)  ->  a wide chart

Rows carry no time. Those of a start with a known end are counted back from it by the time of their steps, which leaves
the start-up before them; those of a start that is running or was killed are counted from its beginning.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from pretrain.errors import EXIT_OK, EXIT_RESUME_ME
from pretrain.report.charts import RESTART, draw_lines, style_axes, to_image
from pretrain.report.panels import DASHES, Line
from pretrain.report.run_data import RunData
from pretrain.report.series import ProgressCurve, make_curve

_LANES = {"tokens_per_s": ("tokens/s", 1.0), "data_wait": ("data wait, %", 100.0)}
_MAX_GROUPS = 600
_UNITS = ((72.0, 1 / 24, "days"), (1.5, 1.0, "hours"), (0.0, 60.0, "minutes"))
"""Units of the time axis: least hours, factor, name."""
_OUTCOMES = {"done": "#009e73", "stopped": "#e69f00", "failed": "#c0392b", "open": "#8a94a0"}
"""Colours of bars."""


@dataclass(frozen=True, slots=True)
class TimelineStart:
    """A start by the clock.

    Attributes:
        number: Number of the start, from 1.
        begin: Hours since the first start began.
        end: Hours since then at its end; None where the run has no record of it.
        from_step: Step of the checkpoint that it resumed from.
        outcome: done, stopped (exit code 75), failed, or open (running, or killed).
    """

    number: int
    begin: float
    end: float | None
    from_step: int
    outcome: str


def place_starts(run: RunData) -> list[TimelineStart]:
    """Returns the starts of a run whose beginning is known, oldest first."""
    placed: list[TimelineStart] = []
    origin: datetime | None = None
    for number, start in enumerate(run.starts, start=1):
        begin, end = instant(start.get("started")), instant(start.get("ended"))
        if begin is None:
            continue
        origin = origin or begin
        code = start.get("exit_code")
        outcome = "open" if code is None else {EXIT_OK: "done", EXIT_RESUME_ME: "stopped"}.get(code, "failed")
        hours = (begin - origin).total_seconds() / 3600
        until = None if end is None else max(hours, (end - origin).total_seconds() / 3600)
        placed.append(TimelineStart(number, hours, until, int(start.get("from_step") or 0), outcome))
    return placed


def instant(text: Any) -> datetime | None:
    """Returns the UTC time of an ISO text; None where it is none."""
    with contextlib.suppress(TypeError, ValueError):
        return datetime.fromisoformat(text).astimezone(UTC)
    return None


def place_points(
    starts: Sequence[TimelineStart], course: ProgressCurve, points: Sequence[tuple[float, float]]
) -> list[np.ndarray]:
    """Returns for each start its own points, over hours since the first start began: float64 [points, 2].

    Args:
        starts: Starts in order.
        course: Progress of the run.
        points: (step, value), in order of steps.
    """
    steps = np.array(points, dtype=np.float64).reshape(-1, 2)
    placed = []
    for start, after in zip(starts, [*starts[1:], None], strict=True):
        last = math.inf if after is None else after.from_step
        offset = course.hours_at(start.from_step)
        total = course.hours_at(max(last, start.from_step)) - offset
        limit = start.end
        if limit is None and after is not None:
            limit = after.begin
        room = math.inf if limit is None else limit - start.begin
        # Where the steps took longer than there is room, a clock was wrong: bars stay in their order.
        scale = room / total if total > room else 1.0
        startup = max(0.0, room - total) if start.end is not None else 0.0
        own = steps[(start.from_step < steps[:, 0]) & (steps[:, 0] <= last)]
        own[:, 0] = start.begin + startup + (course.hours_at(own[:, 0]) - offset) * scale
        placed.append(own)
    return placed


def draw_timeline(run: RunData, color: str) -> str:
    """Returns the chart of a run in a colour; empty where no start is known."""
    from matplotlib.figure import Figure

    starts = place_starts(run)
    if not starts:
        return ""
    rows = place_points(starts, run.course, [(step, 0.0) for step in run.course.steps])
    ends = [max([start.end or start.begin, *own[:, 0]]) for start, own in zip(starts, rows, strict=True)]
    saved = _saved_hours(run)
    latest = max([*ends, *saved, 1 / 60])
    factor, unit = next((factor, unit) for least, factor, unit in _UNITS if latest >= least)
    lanes = {title: _lane(run, starts, name, scale, factor, color) for name, (title, scale) in _LANES.items()}
    lanes = {title: lines for title, lines in lanes.items() if lines}
    figure = Figure(figsize=(12.0, 1.0 + 1.1 * len(lanes)))
    *upper, bars = figure.subplots(
        len(lanes) + 1,
        squeeze=False,
        sharex=True,
        height_ratios=[3.0] * len(lanes) + [1.2],
        gridspec_kw={"hspace": 0.45},
    )[:, 0]
    figure.subplots_adjust(
        left=0.05, right=0.98, top=1 - 0.22 / figure.get_figheight(), bottom=0.42 / figure.get_figheight()
    )
    bars.set_xlim(0.0, latest * factor)
    for axes, (title, lines) in zip(upper, lanes.items(), strict=True):
        draw_lines(axes, lines)
        axes.set_title(title, loc="left", fontsize=8, pad=2)
        axes.tick_params(axis="x", labelbottom=False)
        for start in starts[1:]:
            axes.axvline(start.begin * factor, color=RESTART, linewidth=0.7, linestyle="dotted")
    for start, end in zip(starts, ends, strict=True):
        width = max(end - start.begin, latest / 600) * factor
        bars.broken_barh([(start.begin * factor, width)], (0, 1), color=_OUTCOMES[start.outcome])
        bars.text(start.begin * factor, 0.5, f" {start.number}", color="white", va="center", clip_on=True)
    bars.plot([hour * factor for hour in saved], [1.2] * len(saved), "^", color=RESTART, markersize=4, clip_on=False)
    bars.set_ylim(0, 1)
    style_axes(bars)
    bars.set_yticks([])
    bars.set_xlabel(f"{unit} since the first start", labelpad=1)
    return to_image(figure, "timeline")


def _saved_hours(run: RunData) -> list[float]:
    """Returns when the checkpoints that are on disk were committed."""
    origin = next((begin for start in run.starts if (begin := instant(start.get("started")))), None)
    assert origin is not None, "called for a run with a start only"
    return [hours for saved in run.checkpoints if (hours := (saved.at - origin).total_seconds() / 3600) >= 0]


def _lane(
    run: RunData, starts: Sequence[TimelineStart], name: str, scale: float, factor: float, color: str
) -> list[Line]:
    """Returns the curve of a metric in each start, over time in the unit of the axis."""
    parts = [own for own in place_points(starts, run.course, run.metrics.get(name, [])) if len(own)]
    num_rows = sum(map(len, parts))
    return [
        Line(0, "", color, DASHES[0],
             make_curve(own[:, 0] * factor, own[:, 1] * scale, max(1, _MAX_GROUPS * len(own) // num_rows)))
        for own in parts
    ]  # fmt: skip
