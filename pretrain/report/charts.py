"""Charts of a report as SVG images inside the page: no network, no script, and no text of a run in them."""

import base64
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from pretrain.report.panels import Line, Panel
from pretrain.tracking.picture_files import encode_figure, plain_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_DOTS = 40
"""Curves of no more points than that get a dot at each."""
LOST = "#c0392b"
RESTART = "#8a94a0"
TEXT = "#5c6875"
GRID = "#e8ecf0"


def chart_style() -> AbstractContextManager[None]:
    """Returns the context in which charts are drawn: texts stay texts, in the fonts of the reader."""
    return plain_style(**{"svg.fonttype": "none", "font.size": 8})


def draw_panel(panel: Panel) -> str:
    """Returns the image of a panel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 2.4))
    axes = figure.add_axes((0.13, 0.17, 0.83, 0.76))
    if panel.is_by_tokens:
        axes.set_xscale("log")
    low, high = x_limits(panel)
    axes.set_xlim(low, high)
    for x in panel.restarts:
        if low <= x <= high:
            axes.axvline(x, color=RESTART, linewidth=0.7, linestyle="dotted")
    draw_lines(axes, panel.lines, panel.is_log)
    axes.set_xlabel("tokens" if panel.is_by_tokens else "step", labelpad=1)
    return to_image(figure, panel.title)


def x_limits(panel: Panel) -> tuple[float, float]:
    """Returns the range of steps from 0, or of tokens from the first row on."""
    xs = np.concatenate([values for line in panel.lines for values in (line.curve.xs, line.curve.lost)])
    if panel.is_by_tokens:
        xs = xs[xs > 0]
        return xs.min(initial=xs.max(initial=1.0)) / 1.2, xs.max(initial=1.0) * 1.2
    return min(0.0, xs.min(initial=0.0)), xs.max(initial=1.0)


def y_limits(lines: Sequence[Line], is_log: bool) -> tuple[float, float]:
    """Returns the range of values that an axis shows, with some air.

    On a linear axis the few groups whose extremes are far outside of all others', and of all means, do not count: one
    spike in a month would flatten everything else. Those are marked at the edge, and a note has their range.
    """
    means, lows, highs = (
        np.concatenate([getattr(line.curve, name) for line in lines]) for name in ("means", "lows", "highs")
    )
    if not len(means):
        return (0.1, 1.0) if is_log else (0.0, 1.0)
    if is_log:
        return lows.min() / 1.1, highs.max() * 1.1
    few = int(0.02 * len(means))
    low = min(means.min(), np.sort(lows)[few])
    high = max(means.max(), np.sort(highs)[-1 - few])
    reach = high - low
    low = lows.min() if lows.min() >= low - reach else low
    high = highs.max() if highs.max() <= high + reach else high
    air = 0.04 * (high - low) if high - low > 1e-9 * abs(high) else abs(high) / 2 or 1.0
    # Where the values begin near zero, so does the axis.
    return (0.0 if 0 <= low < 0.15 * high else low - air), high + air


def beyond(panel: Panel) -> list[float]:
    """Returns the extremes of groups that lie outside of the axis of a panel."""
    low, high = y_limits(panel.lines, panel.is_log)
    values = np.concatenate([extremes for line in panel.lines for extremes in (line.curve.lows, line.curve.highs)])
    return values[(values < low) | (values > high)].tolist()


def draw_lines(axes: "Axes", lines: Sequence[Line], is_log: bool = False) -> None:
    """Draws bands, lines, dots where there are few points, and red marks for what is not finite or beyond the axis."""
    low, high = y_limits(lines, is_log)
    if is_log:
        axes.set_yscale("log")
    axes.set_ylim(low, high)
    marks: dict[str, Any] = {"color": LOST, "linestyle": "none", "markersize": 4, "clip_on": False}
    at_edge = axes.get_xaxis_transform()
    for line in lines:
        curve = line.curve
        if curve.is_grouped:
            axes.fill_between(curve.xs, curve.lows, curve.highs, color=line.color, alpha=0.18, linewidth=0)
        dots = "o" if len(curve.xs) <= MAX_DOTS else ""
        axes.plot(curve.xs, curve.means, line.color, linestyle=line.dash, linewidth=1.2, marker=dots, markersize=2.5)
        for xs, y, marker in (
            (curve.xs[curve.highs > high], 1.0, 10),  # matplotlib's carets: 10 points down from the edge, 11 up
            (curve.xs[curve.lows < low], 0.0, 11),
            (curve.lost, 0.0, "|"),
        ):
            if len(xs):
                axes.plot(xs, np.full(len(xs), y), marker=marker, transform=at_edge, **marks)
    style_axes(axes)


def style_axes(axes: "Axes") -> None:
    """Sets grid, ticks and fonts of a pair of axes whose range is known."""
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        if axis.get_scale() == "log" and high > 10 * low:
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
        else:
            axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter(EngFormatter(sep="") if high >= 1e4 else StrMethodFormatter("{x:.6g}"))
        axis.set_minor_formatter(NullFormatter())
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
