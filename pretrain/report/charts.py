"""Charts of a report as SVG images inside the page, without network, script, or text of a run.

Panels of curves (`draw_panel`), and starts with their rows by the clock (`draw_timeline`).
"""

import base64
import contextlib
import math
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from pretrain.errors import EXIT_OK, EXIT_RESUME_ME, EXITS_INTERRUPTED
from pretrain.report.metric_columns import NO_POINTS
from pretrain.report.panels import DASHES, Line, Panel
from pretrain.report.run_data import RunData
from pretrain.report.series import ProgressCurve, make_curve
from pretrain.tracking.picture_files import encode_figure, plain_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_DOTS = 40  # a curve of no more points has a dot at each
LOST = "#c0392b"
RESTART = "#8a94a0"
TEXT = "#5c6875"
GRID = "#e8ecf0"


def chart_style() -> AbstractContextManager[None]:
    """Returns the style of charts, a context: texts stay texts, in the fonts of the reader."""
    return plain_style(**{"svg.fonttype": "none", "font.size": 8})


def draw_panel(panel: Panel) -> str:
    """Returns the image of a panel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 2.4))
    axes = figure.add_axes((0.15, 0.17, 0.81, 0.76))
    if panel.is_by_tokens:
        axes.set_xscale("log")
    low, high = x_limits(panel)
    axes.set_xlim(low, high)
    for x in panel.restarts:
        if low <= x <= high:
            axes.axvline(x, color=RESTART, linewidth=0.7, linestyle="dotted")
    draw_lines(axes, panel.lines, panel.is_log)
    axes.set_xlabel(panel.tokens if panel.is_by_tokens else "step", labelpad=1)
    return to_image(figure, panel.title)


def x_limits(panel: Panel) -> tuple[float, float]:
    """Returns the range of steps from 0, or of tokens from the first row on."""
    curves = [line.curve for line in panel.lines]
    xs = np.concatenate([values for curve in curves for values in (curve.xs, curve.lost)])
    if panel.is_by_tokens:
        xs = xs[xs > 0]
        return xs.min(initial=xs.max(initial=1.0)) / 1.2, xs.max(initial=1.0) * 1.2
    return min(0.0, xs.min(initial=0.0)), xs.max(initial=1.0)


def y_limits(lines: Sequence[Line], is_log: bool) -> tuple[float, float]:
    """Returns the range of values that an axis shows, with some air.

    On a linear axis the few groups whose extremes are far outside of all others', and of all
    means, do not count: one spike in a month would flatten everything else. A note has their
    range.
    """
    means = np.concatenate([line.curve.means for line in lines])
    lows = np.concatenate([line.curve.lows for line in lines])
    highs = np.concatenate([line.curve.highs for line in lines])
    if not len(means):
        return (0.1, 1.0) if is_log else (0.0, 1.0)
    if is_log:
        return lows.min() / 1.1, highs.max() * 1.1
    few = int(0.02 * len(means))
    low = min(means.min(), np.sort(lows)[few])
    high = max(means.max(), np.sort(highs)[-1 - few])
    reach = high - low
    if lows.min() >= low - reach:
        low = lows.min()
    if highs.max() <= high + reach:
        high = highs.max()
    air = abs(high) / 2 or 1.0
    if high - low > 1e-9 * abs(high):
        air = 0.04 * (high - low)
    air = max(air, 2e-3 * abs(high))  # labels of a smaller range, as of a rate at its peak, are cut: 0.000999994
    if 0 <= low < 0.15 * high:  # where the values begin near zero, so does the axis
        return 0.0, high + air
    return low - air, high + air


def beyond(panel: Panel) -> list[float]:
    """Returns the extremes of groups that lie outside of the axis of a panel."""
    low, high = y_limits(panel.lines, panel.is_log)
    curves = [line.curve for line in panel.lines]
    values = np.concatenate([values for curve in curves for values in (curve.lows, curve.highs)])
    return values[(values < low) | (values > high)].tolist()


def draw_lines(axes: "Axes", lines: Sequence[Line], is_log: bool = False) -> None:
    """Draws bands, lines, dots of few points, and red marks of values not finite or off the axis."""
    low, high = y_limits(lines, is_log)
    if is_log:
        axes.set_yscale("log")
    axes.set_ylim(low, high)
    band: dict[str, Any] = {"alpha": 0.18, "linewidth": 0}
    solid: dict[str, Any] = {"linewidth": 1.2, "markersize": 2.5}
    marks: dict[str, Any] = {"color": LOST, "linestyle": "none", "markersize": 4, "clip_on": False}
    at_edge = axes.get_xaxis_transform()
    for line in lines:
        curve = line.curve
        if curve.is_grouped:
            axes.fill_between(curve.xs, curve.lows, curve.highs, color=line.color, **band)
        dots = "o" if len(curve.xs) <= MAX_DOTS else ""
        axes.plot(curve.xs, curve.means, line.color, linestyle=line.dash, marker=dots, **solid)
        # matplotlib's carets: 10 points down from the edge, 11 up.
        for xs, y, marker in (
            (curve.xs[curve.highs > high], 1.0, 10),
            (curve.xs[curve.lows < low], 0.0, 11),
            (curve.lost, 0.0, "|"),
        ):
            if len(xs):
                axes.plot(xs, np.full(len(xs), y), marker=marker, transform=at_edge, **marks)
    style_axes(axes)


def style_axes(axes: "Axes") -> None:
    """Sets grid, ticks and fonts of a pair of axes whose range is known."""
    from matplotlib import ticker

    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        if axis.get_scale() == "log" and high > 10 * low:
            axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
        else:
            axis.set_major_locator(ticker.MaxNLocator(5))
        short = ticker.EngFormatter(sep="")
        axis.set_major_formatter(short if high >= 1e4 else ticker.StrMethodFormatter("{x:.6g}"))
        axis.set_minor_formatter(ticker.NullFormatter())
        axis.label.set(fontsize=8, color=TEXT)
    axes.tick_params(labelsize=8, labelcolor=TEXT, color=RESTART, length=3)
    axes.tick_params(which="minor", length=0)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(RESTART)


def to_image(figure: "Figure", alt: str) -> str:
    """Returns a figure as an `img` element that holds its SVG. Call it within `chart_style`."""
    svg = encode_figure(figure, "svg").decode()
    svg = svg[svg.index("<svg") :]
    # A hundredth of a point is enough for a path, and half of its size.
    svg = re.sub(r' d="[^"]+"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)
    source = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{escape(alt)}" src="data:image/svg+xml;base64,{source}">'


# The timeline: starts as bars in the colour of their outcome, under throughput, data wait, checkpoints.
#
# Rows carry no time. Those of a start with a known end are counted back from it by the time of their
# steps, which leaves the start-up before them; those of other starts are counted from the beginning.

_LANES = {"tokens_per_s": ("tokens/s", 1.0), "data_wait": ("data wait, %", 100.0)}
_MAX_GROUPS = 600
# Least hours, factor, name.
_UNITS = ((72.0, 1 / 24, "days"), (1.5, 1.0, "hours"), (1 / 30, 60.0, "minutes"), (0.0, 3600.0, "seconds"))
_CODES: dict[int | None, str] = {None: "open", EXIT_OK: "done"}
_CODES |= dict.fromkeys((EXIT_RESUME_ME, *EXITS_INTERRUPTED), "stopped")
_OUTCOMES = {"done": "#009e73", "stopped": "#e69f00", "failed": "#c0392b", "open": "#8a94a0"}


@dataclass(frozen=True, slots=True)
class TimelineStart:
    """A start by the clock."""

    number: int  # from 1
    begin: float  # hours since the first start began
    end: float | None  # hours since then; None where the run has no record of it
    from_step: int
    outcome: str  # done, stopped (exit code 75), failed, or open (running, or killed)


def place_starts(run: RunData) -> list[TimelineStart]:
    """Returns the starts of a run whose beginning is known, oldest first."""
    placed: list[TimelineStart] = []
    origin: datetime | None = None
    for number, start in enumerate(run.starts, start=1):
        begin, end = instant(start.get("started")), instant(start.get("ended"))
        if begin is None:
            continue
        origin = origin or begin
        hours = (begin - origin).total_seconds() / 3600
        until = None if end is None else max(hours, (end - origin).total_seconds() / 3600)
        from_step = int(start.get("from_step") or 0)
        outcome = _CODES.get(start.get("exit_code"), "failed")
        placed.append(TimelineStart(number, hours, until, from_step, outcome))
    return placed


def instant(text: Any) -> datetime | None:
    """Returns the UTC time of an ISO text; None where it is none."""
    with contextlib.suppress(TypeError, ValueError):
        return datetime.fromisoformat(text).astimezone(UTC)
    return None


def place_points(
    starts: Sequence[TimelineStart], course: ProgressCurve, steps: np.ndarray
) -> list[tuple[slice, np.ndarray]]:
    """Returns each start's own of the points at sorted steps, and their hours since the first start."""
    placed = []
    for start, after in zip(starts, [*starts[1:], None], strict=True):
        last = math.inf if after is None else after.from_step
        offset = course.hours_at(start.from_step)
        total = course.hours_at(max(last, start.from_step)) - offset
        limit = start.end
        if limit is None and after is not None:
            limit = after.begin
        room = math.inf if limit is None else limit - start.begin
        # If the steps took longer than there is room, a clock was wrong: bars stay in their order.
        scale = room / total if total > room else 1.0
        startup = max(0.0, room - total) if start.end is not None else 0.0
        mine = slice(*np.searchsorted(steps, [start.from_step, last], side="right"))
        hours = (course.hours_at(steps[mine]) - offset) * scale
        placed.append((mine, start.begin + startup + hours))
    return placed


def draw_timeline(run: RunData, color: str) -> str:
    """Returns the chart of a run in a colour; empty where no start is known."""
    from matplotlib.figure import Figure

    starts = place_starts(run)
    if not starts:
        return ""
    rows = place_points(starts, run.course, run.course.steps)
    ends = [hours.max(initial=start.end or start.begin) for start, (_, hours) in zip(starts, rows, strict=True)]
    origin = next(begin for start in run.starts if (begin := instant(start.get("started"))))
    saved = [(one.at - origin).total_seconds() / 3600 for one in run.checkpoints if one.at >= origin]
    latest = max([*ends, *saved, 1 / 3600])
    factor, unit = next((factor, unit) for least, factor, unit in _UNITS if latest >= least)
    lanes = _lanes(run, starts, factor, color)
    figure = Figure(figsize=(12.0, 1.0 + 1.1 * len(lanes)))
    *upper, bars = figure.subplots(
        len(lanes) + 1,
        squeeze=False,
        sharex=True,
        height_ratios=[3.0] * len(lanes) + [1.2],
        gridspec_kw={"hspace": 0.45},
    )[:, 0]
    height = figure.get_figheight()
    figure.subplots_adjust(left=0.05, right=0.98, top=1 - 0.22 / height, bottom=0.42 / height)
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
    triangles: dict[str, Any] = {"color": RESTART, "markersize": 4, "clip_on": False}
    bars.plot([hour * factor for hour in saved], [1.2] * len(saved), "^", **triangles)
    bars.set_ylim(0, 1)
    style_axes(bars)
    bars.set_yticks([])
    bars.set_xlabel(f"{unit} since the first start", labelpad=1)
    return to_image(figure, "timeline")


def _lanes(run: RunData, starts: Sequence[TimelineStart], factor: float, color: str) -> dict[str, list[Line]]:
    """Returns the curves above the bars by their title; none of a metric without a row."""
    lanes = {}
    for name, (title, scale) in _LANES.items():
        points = run.metrics.get(name, NO_POINTS)
        placed = place_points(starts, run.course, points.steps)
        parts = [(hours * factor, points.values[mine] * scale) for mine, hours in placed]
        if any(len(hours) for hours, _ in parts):
            lanes[title] = _lane(parts, color)
    return lanes


def _lane(parts: Sequence[tuple[np.ndarray, np.ndarray]], color: str) -> list[Line]:
    """Returns the curve of each start, from its times in the unit of the axis and its values."""
    num_rows = sum(len(xs) for xs, _ in parts)
    lines = []
    for xs, values in parts:
        if len(xs):
            curve = make_curve(xs, values, max(1, _MAX_GROUPS * len(xs) // num_rows))
            lines.append(Line(0, "", color, DASHES[0], curve))
    return lines
