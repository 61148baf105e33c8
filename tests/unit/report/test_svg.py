"""Axes and ticks of a report's curves."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.report.panels import Line, Panel
from pretrain.report.series import make_curve
from pretrain.report.svg import Axis, beyond, draw_panel, make_ticks, tick_texts, y_range


def line(values, max_groups=400):
    """A curve of values at steps 0, 1 and so on."""
    return Line(0, "", "#123456", "", make_curve(list(enumerate(values)), max_groups))


def panel(values, max_groups=400, is_log=False):
    """A panel of one curve."""
    return Panel("Loss", "nats", [line(values, max_groups)], False, is_log, True)


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0, 3000, ["0", "1000", "2000", "3000"]),
        (0, 1, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (0, 0.0005, ["0", "1e-4", "2e-4", "3e-4", "4e-4", "5e-4"]),
        (0, 2.5e6, ["0", "0.5M", "1M", "1.5M", "2M", "2.5M"]),
        (10_000, 50_000, ["10k", "20k", "30k", "40k", "50k"]),
        (-1.5, 1.5, ["-1", "0", "1"]),
        (1e9, 5e12, ["1T", "2T", "3T", "4T", "5T"]),
    ],
)
def test_ticks_are_round_and_share_a_unit(low, high, texts):
    assert tick_texts(make_ticks(low, high)) == texts


def test_ticks_of_a_logarithmic_axis_are_powers_of_ten():
    assert make_ticks(0.02, 2000, is_log=True) == pytest.approx([0.1, 1, 10, 100, 1000])
    assert len(make_ticks(1e-9, 1e9, is_log=True)) <= 7
    assert make_ticks(2, 6, is_log=True) == [2, 3, 4, 5, 6]


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_lie_in_the_range_and_are_few(low, width):
    high = low + width
    ticks = make_ticks(low, high)
    assert len(ticks) <= 12 and ticks == sorted(ticks)
    # A tick at the very end may be off by the rounding of the step.
    assert all(low - 1e-6 * width - 1e-9 * abs(low) <= tick <= high + 1e-6 * width + 1e-9 * abs(high) for tick in ticks)
    assert len(tick_texts(ticks)) == len(ticks)


def test_an_axis_places_its_ends_and_logarithms():
    assert (Axis(0, 10, 100, 0).place(0), Axis(0, 10, 100, 0).place(10)) == (100, 0)
    assert Axis(1, 100, 0, 50, is_log=True).place(10) == pytest.approx(25)
    assert Axis(1, 100, 0, 50, is_log=True).place(-3) == 0


def test_the_axis_begins_at_nothing_where_values_do():
    assert y_range([line([0.1, 10.0])], is_log=False)[0] == 0.0
    assert y_range([line([8.0, 10.0])], is_log=False)[0] == pytest.approx(7.92)
    low, high = y_range([line([5.0, 5.0])], is_log=False)
    assert low < 5.0 < high


def test_a_lone_spike_of_a_grouped_curve_is_marked_beyond_the_axis():
    values = [2.0 + 0.5 * math.sin(number) for number in range(10_000)]
    values[5000] = 400.0
    shown = panel(values, 100)
    assert y_range(shown.lines, is_log=False)[1] < 10
    assert beyond(shown) == [400.0]
    assert draw_panel(shown, []).count('class="beyond"') == 1
    assert beyond(panel(values, 10_000)) == []


def test_a_panel_is_svg_with_axis_line_marks_and_restarts():
    svg = draw_panel(panel([1.0, math.nan, 3.0]), [(0, 1.0), (1, 1.0)])
    assert svg.startswith("<svg") and svg.endswith("</svg>")
    assert (svg.count('class="line"'), svg.count('class="lost"'), svg.count('class="restart"')) == (1, 1, 1)
    assert ">step</text>" in svg and svg.count("<circle") == 2


def test_a_panel_without_a_finite_value_is_drawn():
    assert 'class="line"' not in draw_panel(panel([math.nan, math.nan]), [])
    assert "<svg" in draw_panel(panel([math.nan], is_log=True), [])
