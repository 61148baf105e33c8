"""Charts of a report: ranges of axes, marks, and images that hold no text of a run."""

import base64
import math
from xml.etree import ElementTree

import numpy as np
import pytest

from pretrain.report.charts import beyond, chart_style, draw_panel, y_limits
from pretrain.report.panels import Line, Panel
from pretrain.report.series import make_curve


def line(values, max_groups=400):
    """A curve of values at steps 0, 1 and so on."""
    return Line(
        0, "", "#123456", "solid", make_curve(np.arange(len(values), dtype=float), np.array(values), max_groups)
    )


def panel(values, max_groups=400, **options):
    """A panel of one curve."""
    return Panel("Loss", "nats", [line(values, max_groups)], [1.0], **options)


def svg_of(shown):
    """The SVG inside the image of a panel."""
    with chart_style():
        image = draw_panel(shown)
    text = base64.b64decode(image.split("base64,")[1].removesuffix('">')).decode()
    ElementTree.fromstring(text)
    return text


def test_the_axis_begins_at_zero_where_values_do():
    assert y_limits([line([0.1, 10.0])], is_log=False)[0] == 0.0
    assert y_limits([line([8.0, 10.0])], is_log=False)[0] == pytest.approx(7.92)
    low, high = y_limits([line([5.0, 5.0])], is_log=False)
    assert low < 5.0 < high


def test_a_range_that_is_narrow_beside_its_values_has_short_labels():
    svg = svg_of(panel([1e-3, 9.9999e-4, 9.9998e-4]))
    assert ">0.001</text>" in svg and ">0.000999</text>" in svg and "0.00099999" not in svg


def test_a_lone_spike_of_a_grouped_curve_is_marked_beyond_the_axis():
    values = [2.0 + 0.5 * math.sin(number) for number in range(10_000)]
    values[5000] = 400.0
    shown = panel(values, 100)
    assert y_limits(shown.lines, is_log=False)[1] < 10
    assert beyond(shown) == [400.0]
    assert "#c0392b" in svg_of(shown)
    assert beyond(panel(values, 10_000)) == [] and "#c0392b" not in svg_of(panel(values, 10_000))


def test_values_that_are_not_finite_and_restarts_are_marked():
    svg = svg_of(panel([1.0, math.nan, 3.0]))
    assert "#c0392b" in svg and "#8a94a0" in svg and ">step</text>" in svg


def test_a_curve_over_tokens_has_two_logarithmic_axes():
    svg = svg_of(panel([math.nan, 3.0, 2.5, 2.0] * 100, is_log=True, is_by_tokens=True))
    assert all(f">{text}</text>" in svg for text in ("tokens", "1", "10", "100"))


@pytest.mark.parametrize("values", [[math.nan] * 2, [1e149, -1e149], [1e-300, 0.0], [math.inf, 1e200]])
@pytest.mark.parametrize("is_by_tokens", [False, True])
def test_any_values_are_drawn(values, is_by_tokens):
    assert svg_of(panel(values, is_by_tokens=is_by_tokens)).startswith("<svg")


def test_a_chart_is_the_same_each_time():
    assert svg_of(panel([1.0, 2.0])) == svg_of(panel([1.0, 2.0]))
