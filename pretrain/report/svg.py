"""Curves as inline SVG: axes, bands and lines. The page's script draws the same, smoothed or over another x axis.

    draw_panel(panel, restarts)  ->  <svg> of a fixed size, which scales with the page

What it draws and where is in `GEOMETRY`, `make_ticks` and `tick_texts`; run_page.js does the same arithmetic, and a
test in a browser compares the two.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from pretrain.report.panels import Line, Panel

GEOMETRY = {"width": 420, "height": 240, "left": 52, "right": 22, "top": 8, "bottom": 36}
"""Of a panel, in pixels at its natural size."""
NUM_TICKS = 5
MAX_DOTS = 40
"""Curves of no more points than that get a dot at each."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values, drawn from `start` to `end` (pixels)."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """Returns the pixel of a value; a logarithmic axis has none below its range."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def y_range(lines: Sequence[Line], is_log: bool) -> tuple[float, float]:
    """Returns the smallest and the largest value that an axis shows, with some air.

    On a linear axis the few groups whose extremes are far outside of all others', and of all means, do not count: one
    spike in a month would flatten everything else. They are marked, and the panel's note tells how far they go.
    """
    lows = [value for line in lines for value in line.curve.lows or line.curve.means]
    highs = [value for line in lines for value in line.curve.highs or line.curve.means]
    means = [value for line in lines for value in line.curve.means]
    if is_log:
        lows = [value for value in lows if value > 0]
        if not lows:
            return 0.1, 1.0
        low, high = min(lows), max(highs)
        return (low / 1.1, high * 1.1) if high / low > 1.01 else (low / 2, high * 2)
    if not means:
        return 0.0, 1.0
    low, high = _without_few(lows, highs, means)
    if high - low <= 1e-9 * abs(high):
        air = abs(high) / 2 or 1.0
        return low - air, high + air
    air = 0.04 * (high - low)
    # Where the values begin at nothing, so does the axis.
    return (0.0 if low >= 0 and low < 0.15 * high else low - air), high + air


def _without_few(lows: Sequence[float], highs: Sequence[float], means: Sequence[float]) -> tuple[float, float]:
    at = int(0.02 * len(means))
    low, high = min(*means, sorted(lows)[at]), max(*means, sorted(highs)[-1 - at])
    reach = high - low
    least, most = min(lows), max(highs)
    return (least if least >= low - reach else low), (most if most <= high + reach else high)


def beyond(panel: Panel) -> list[float]:
    """Returns the extremes of groups that lie outside of the axis of a panel."""
    low, high = y_range(panel.lines, panel.is_log)
    return [
        value for line in panel.lines for value in (*line.curve.lows, *line.curve.highs) if not low <= value <= high
    ]


def make_ticks(low: float, high: float, is_log: bool = False, count: int = NUM_TICKS) -> list[float]:
    """Returns round values in a range, about `count`: steps of 1, 2 or 5; on a logarithmic axis powers of ten."""
    if is_log:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        if last - first >= 1:
            stride = math.ceil((last - first + 1) / (count + 1))
            return [10.0**power for power in range(first, last + 1, stride)]
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    for factor in (1, 2, 5, 10):
        if (high - low) / (step * factor) <= count + 0.5:
            step *= factor
            break
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Returns what stands at ticks: all in the same unit, with the digits that tell them apart."""
    most = max((abs(tick) for tick in ticks), default=0.0)
    if not most:
        return ["0" for _ in ticks]
    steps = [abs(b - a) for a, b in itertools.pairwise(ticks) if b != a]
    step = min(steps, default=most)
    if most < 0.01:
        power = math.floor(math.log10(most) + 1e-9)
        return [f"{_trim(tick / 10.0**power, step / 10.0**power)}e{power}" if tick else "0" for tick in ticks]
    unit, sign = next(((u, s) for u, s in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")) if most >= u), (1.0, ""))
    unit = 1e3 if sign == "k" else unit
    return [_trim(tick / unit, step / unit) + (sign if tick else "") for tick in ticks]


def _trim(value: float, step: float) -> str:
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    text = f"{value:.{min(digits, 6)}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text if text != "-0" else "0"


def draw_panel(panel: Panel, restarts: Sequence[tuple[int, float]], x_name: str = "step") -> str:
    """Returns the SVG of a panel over steps.

    Args:
        panel: What to draw.
        restarts: (run, step) at which a run was started again.
        x_name: Says what x is.
    """
    g = GEOMETRY
    bottom, right = g["height"] - g["bottom"], g["width"] - g["right"]
    xs = [x for line in panel.lines for x in (*line.curve.xs[:1], *line.curve.xs[-1:], *line.curve.lost)]
    low, high = min([0.0, *xs]), max([1.0, *xs])
    y_low, y_high = y_range(panel.lines, panel.is_log)
    x_axis = Axis(low, high, g["left"], right)
    y_axis = Axis(y_low, y_high, bottom, g["top"], panel.is_log)
    shown = {line.run for line in panel.lines}
    parts = [
        f'<svg viewBox="0 0 {g["width"]} {g["height"]}" role="img" aria-label="{escape(panel.title)}">',
        *draw_axes(x_axis, y_axis, x_name),
        *(
            f'<path class="restart" d="M{x_axis.place(step):.1f} {g["top"]}V{bottom}"/>'
            for run, step in restarts
            if run in shown
        ),
        *(part for line in panel.lines for part in draw_line(line, x_axis, y_axis)),
    ]
    return "".join([*parts, "</svg>"])


def draw_axes(x_axis: Axis, y_axis: Axis, x_name: str) -> list[str]:
    """Returns grid, ticks and the name of x."""
    parts = []
    y_ticks = make_ticks(y_axis.low, y_axis.high, y_axis.is_log)
    for tick, text in zip(y_ticks, _texts(y_ticks, y_axis.is_log), strict=True):
        y = y_axis.place(tick)
        parts.append(f'<path class="grid" d="M{x_axis.start} {y:.1f}H{x_axis.end}"/>')
        parts.append(f'<text class="tick" x="{x_axis.start - 5}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    x_ticks = make_ticks(x_axis.low, x_axis.high)
    for tick, text in zip(x_ticks, tick_texts(x_ticks), strict=True):
        x = x_axis.place(tick)
        parts.append(f'<path class="axis" d="M{x:.1f} {y_axis.start}v4"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{y_axis.start + 15}" text-anchor="middle">{text}</text>')
    parts.append(f'<path class="axis" d="M{x_axis.start} {y_axis.start}H{x_axis.end}"/>')
    middle = (x_axis.start + x_axis.end) / 2
    parts.append(
        f'<text class="name" x="{middle}" y="{y_axis.start + 30}" text-anchor="middle">{escape(x_name)}</text>'
    )
    return parts


def _texts(ticks: Sequence[float], is_log: bool) -> list[str]:
    is_decades = is_log and len(ticks) > 1 and ticks[1] / ticks[0] > 9
    return [tick_texts([tick])[0] for tick in ticks] if is_decades else tick_texts(ticks)


def draw_line(line: Line, x_axis: Axis, y_axis: Axis) -> list[str]:
    """Returns the band, the line, dots where there are few points, and a mark at each value that was lost."""
    curve, color = line.curve, escape(line.color)
    xs = [x_axis.place(x) for x in curve.xs]
    means = [y_axis.place(value) for value in curve.means]
    parts = []
    if curve.is_grouped:
        upper = [(x, y_axis.place(min(value, y_axis.high))) for x, value in zip(xs, curve.highs, strict=True)]
        lower = [(x, y_axis.place(max(value, y_axis.low))) for x, value in zip(xs, curve.lows, strict=True)]
        parts.append(f'<path class="band" fill="{color}" d="{_path([*upper, *reversed(lower)])}Z"/>')
    points = list(zip(xs, means, strict=True))
    if points:
        dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
        parts.append(f'<path class="line" stroke="{color}"{dash} d="{_path(points)}"/>')
    if 0 < len(points) <= MAX_DOTS:
        parts += [f'<circle fill="{color}" cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in points]
    for x, low, high in zip(xs, curve.lows, curve.highs, strict=curve.is_grouped):
        if high > y_axis.high:
            parts.append(f'<path class="beyond" d="M{x:.1f} {y_axis.end}l-4 7h8Z"/>')
        if low < y_axis.low:
            parts.append(f'<path class="beyond" d="M{x:.1f} {y_axis.start}l-4 -7h8Z"/>')
    for x in curve.lost:
        parts.append(f'<path class="lost" d="M{x_axis.place(x):.1f} {y_axis.start}v-7"/>')
    return parts


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
