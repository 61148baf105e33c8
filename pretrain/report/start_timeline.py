"""A run by the clock: its starts as bars, with how each ended, over throughput, data wait and checkpoints.

    place_starts(run)   ->  hours of each start since the first began, and what became of it
    place_points(...)   ->  the points of each start, by the hour
    draw_timeline(run)  ->  a wide SVG

Rows carry no clock. Those of a start that ended are counted back from its end by the time of their steps, so that what
is left before them is start-up; those of one that goes on, or ended without a word, are counted on from its beginning.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from html import escape
from typing import Any

from pretrain.errors import EXIT_OK, EXIT_RESUME_ME
from pretrain.report.panels import DASHES, Line
from pretrain.report.run_data import RunData
from pretrain.report.series import ProgressCurve, make_curve
from pretrain.report.svg import Axis, draw_line, make_ticks, tick_texts, y_range

WIDTH, LEFT, RIGHT = 1200, 56, 26
_LANES = (("tokens_per_s", "tokens/s", 1.0, 90), ("data_wait", "data wait, %", 100.0, 56))
_GAP, _BARS, _BOTTOM = 14, 22, 40
_MAX_GROUPS = 600
_OUTCOMES = {"done": "#009e73", "stopped": "#e69f00", "failed": "#c0392b", "open": "#8a94a0"}
"""Colours of bars."""


@dataclass(frozen=True, slots=True)
class TimelineStart:
    """A start by the clock.

    Attributes:
        number: From 1.
        begin: Hours since the first start began.
        end: The same; None where nobody wrote it down.
        from_step: What it went on from.
        outcome: done, stopped (exit code 75), failed, or open: it goes on, or ended without a word.
        said: How it ended, in words.
        job: Of Slurm, with its restart; empty outside of it.
    """

    number: int
    begin: float
    end: float | None
    from_step: int
    outcome: str
    said: str
    job: str


def place_starts(run: RunData) -> list[TimelineStart]:
    """Returns the starts of a run whose beginning is known, oldest first."""
    placed: list[TimelineStart] = []
    origin: datetime | None = None
    for number, start in enumerate(run.starts, start=1):
        begin, end = instant(start.get("started")), instant(start.get("ended"))
        if begin is None:
            continue
        origin = origin or begin
        code, is_last = start.get("exit_code"), number == len(run.starts)
        outcome = "open" if code is None else {EXIT_OK: "done", EXIT_RESUME_ME: "stopped"}.get(code, "failed")
        said = str(start.get("reason") or "")
        if code is None:
            said = "goes on, or was killed" if is_last else "ended without a word: killed, or its node was lost"
        elif code:
            said = f"exit code {code}: {said}"
        restart = start.get("restart")
        job = f"{start.get('job') or ''}{f'+{restart}' if restart else ''}"
        hours = (begin - origin).total_seconds() / 3600
        until = None if end is None else max(hours, (end - origin).total_seconds() / 3600)
        from_step = start.get("from_step")
        placed.append(TimelineStart(number, hours, until, int(from_step or 0), outcome, said, job))
    return placed


def instant(text: Any) -> datetime | None:
    """Returns the time that an ISO text tells, UTC; None where it tells none."""
    with contextlib.suppress(TypeError, ValueError):
        return datetime.fromisoformat(text).astimezone(UTC)
    return None


def clock_of(starts: Sequence[TimelineStart], course: ProgressCurve) -> list[Callable[[float], float]]:
    """Returns for each start what gives the hours since the first start began at a step that it did.

    Args:
        starts: In order.
        course: Of the run.
    """
    clocks: list[Callable[[float], float]] = []
    for place, start in enumerate(starts):
        after = starts[place + 1] if place + 1 < len(starts) else None
        offset = course.hours_at(start.from_step)
        total = course.hours_at(math.inf if after is None else max(after.from_step, start.from_step)) - offset
        limit = start.end if start.end is not None else after.begin if after else None
        room = math.inf if limit is None else limit - start.begin
        scale = room / total if total > room else 1.0
        startup = max(0.0, room - total) if start.end is not None else 0.0
        clocks.append(partial(_hour, course, offset, start.begin + startup, scale))
    return clocks


def _hour(course: ProgressCurve, offset: float, begin: float, scale: float, step: float) -> float:
    return begin + (course.hours_at(step) - offset) * scale


def place_points(
    starts: Sequence[TimelineStart], course: ProgressCurve, points: Sequence[tuple[float, float]]
) -> list[list[tuple[float, float]]]:
    """Returns for each start the points that are its own, over hours since the first start began.

    Args:
        starts: In order.
        course: Of the run.
        points: (step, value), in order of steps.
    """
    clocks, placed = clock_of(starts, course), []
    for place, (start, clock) in enumerate(zip(starts, clocks, strict=True)):
        last = starts[place + 1].from_step if place + 1 < len(starts) else math.inf
        placed.append([(clock(step), value) for step, value in points if start.from_step < step <= last])
    return placed


def draw_timeline(run: RunData, color: str) -> str:
    """Returns the SVG; empty where no start is known.

    Args:
        run: The run.
        color: Of its curves.
    """
    starts = place_starts(run)
    if not starts:
        return ""
    steps = place_points(starts, run.course, [(step, 0.0) for step in run.course.steps])
    ends = [
        max([start.end or start.begin, *(hour for hour, _ in points)])
        for start, points in zip(starts, steps, strict=True)
    ]
    saved = _saved_hours(run)
    x_axis = Axis(0.0, max([*ends, *saved, 1 / 60]), LEFT, WIDTH - RIGHT)
    parts, top = [], float(_GAP)
    for name, title, scale, height in _LANES:
        points = [(step, value * scale) for step, value in run.metrics.get(name, [])]
        if lane := _draw_lane(place_points(starts, run.course, points), title, color, x_axis, top, height):
            parts += lane
            top += height + 2 * _GAP
    for hour in saved:
        parts.append(f'<path class="saved" d="M{x_axis.place(hour):.1f} {top - 8:.1f}l4 7h-8Z"/>')
    for start, end in zip(starts, ends, strict=True):
        parts += _draw_bar(start, end, x_axis, top)
    restarts = [f'<path class="restart" d="M{x_axis.place(start.begin):.1f} 4V{top}"/>' for start in starts[1:]]
    bottom = top + _BARS
    hours_axis = _draw_hours(x_axis, bottom)
    return (
        f'<svg class="wide" viewBox="0 0 {WIDTH} {bottom + _BOTTOM:.0f}" role="img" aria-label="timeline">'
        + "".join([*restarts, *parts, *hours_axis])
        + "</svg>"
    )


def _saved_hours(run: RunData) -> list[float]:
    """Returns when the checkpoints that are on disk were committed."""
    origin = next((begin for start in run.starts if (begin := instant(start.get("started")))), None)
    assert origin is not None, "asked for a run with a start only"
    return [hours for saved in run.checkpoints if (hours := (saved.at - origin).total_seconds() / 3600) >= 0]


def _draw_lane(
    points: Sequence[Sequence[tuple[float, float]]], title: str, color: str, x_axis: Axis, top: float, height: float
) -> list[str]:
    count = sum(map(len, points))
    lines = [
        Line(0, "", color, DASHES[0], make_curve(part, max(1, _MAX_GROUPS * len(part) // count)))
        for part in points
        if part
    ]
    if not lines:
        return []
    low, high = y_range(lines, is_log=False)
    y_axis = Axis(low, high, top + height, top)
    parts = [f'<text class="name" x="{LEFT}" y="{top - 3}">{escape(title)}</text>']
    ticks = make_ticks(low, high, count=3)
    for tick, text in zip(ticks, tick_texts(ticks), strict=True):
        y = y_axis.place(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    return parts + [part for line in lines for part in draw_line(line, x_axis, y_axis)]


def _draw_bar(start: TimelineStart, end: float, x_axis: Axis, top: float) -> list[str]:
    left, right = x_axis.place(start.begin), x_axis.place(end)
    width = max(2.0, right - left)
    words = f"{start.number}{f', job {start.job}' if start.job else ''}: {start.said or start.outcome}"
    fits = int((width - 8) / 6.5)
    shown = words if len(words) <= fits else words[: fits - 3] + "..." if fits >= 12 else str(start.number)
    label = f'<text class="bar" x="{left + 5:.1f}" y="{top + 15:.1f}">{escape(shown)}</text>' if fits >= 2 else ""
    return [
        f'<g><title>start {escape(words)}</title><rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
        f'height="{_BARS}" fill="{_OUTCOMES[start.outcome]}"/>{label}</g>'
    ]


def _draw_hours(x_axis: Axis, bottom: float) -> list[str]:
    """Returns the ticks of time: minutes, hours or days since the first start."""
    factor, unit = next(
        (factor, unit)
        for factor, unit, least in ((1 / 24, "days", 72.0), (1.0, "hours", 1.5), (60.0, "minutes", 0.0))
        if x_axis.high >= least
    )
    ticks = make_ticks(0.0, x_axis.high * factor, count=10)
    parts = [f'<path class="axis" d="M{LEFT} {bottom:.1f}H{WIDTH - RIGHT}"/>']
    for tick, text in zip(ticks, tick_texts(ticks), strict=True):
        x = x_axis.place(tick / factor)
        parts.append(f'<path class="axis" d="M{x:.1f} {bottom:.1f}v4"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{text}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    name = f"{unit} since the first start"
    return [*parts, f'<text class="name" x="{middle}" y="{bottom + 32:.1f}" text-anchor="middle">{name}</text>']
