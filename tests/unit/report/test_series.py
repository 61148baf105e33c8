"""Curves of a bounded size: what is left out of a drawing is never an extreme."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.report.series import PARTS, make_course, make_curve, seconds_of_step
from pretrain.tracking import meter
from tests.unit.report.run_folders import tables_of

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300)


def curve_of(points, max_groups):
    """The curve of (x, value) pairs."""
    xs, values = np.array(points, dtype=float).T
    return make_curve(xs, values, max_groups)


def test_the_parts_of_a_step_are_those_of_the_tracker():
    assert PARTS == meter.PARTS


def test_a_curve_of_few_rows_is_the_rows():
    curve = curve_of([(1, 5.0), (2, math.nan), (3, 6.0), (4, math.inf)], 2)
    assert (curve.xs.tolist(), curve.means.tolist(), curve.is_grouped) == ([1, 3], [5.0, 6.0], False)
    assert (curve.lost.tolist(), curve.num_rows, curve.num_lost) == ([2, 4], 2, 2)


@settings(max_examples=50)
@given(VALUES, st.integers(1, 50))
def test_a_grouped_curve_keeps_extremes_and_the_mean_of_all(values, max_groups):
    curve = curve_of(list(enumerate(values)), max_groups)
    assert len(curve.xs) <= max_groups and (np.diff(curve.xs) > 0).all()
    assert (curve.lows.min(), curve.highs.max()) == (min(values), max(values))
    # A sum of 300 values is rounded 300 times.
    air = 1e-9 * np.abs(values).max()
    assert (curve.lows - air <= curve.means).all() and (curve.means <= curve.highs + air).all()


def test_one_spike_in_a_month_is_in_the_curve():
    points = [(step, 2.0) for step in range(100_000)]
    points[54_321] = (54_321, 99.0)
    curve = curve_of(points, 400)
    assert len(curve.xs) == 400 and curve.num_rows == 100_000
    assert curve.highs.max() == 99.0 and (curve.highs > 2.0).sum() == 1


def test_rows_of_one_step_are_one_group():
    curve = curve_of([(5, float(value)) for value in range(10)], 3)
    assert (curve.xs.tolist(), curve.lows.tolist(), curve.highs.tolist()) == ([5], [0.0], [9.0])


def test_hours_add_up_the_time_of_steps_and_the_parts_go_first():
    rows = [
        {"step": 10, "tokens": 100.0, "step_time_s": 3600.0},
        {"step": 10, "val_loss": 1.0},
        {"step": 20, "tokens": 200.0, "step_time_s": 1.0, "forward_s": 1000.0, "evaluation_s": 800.0},
        {"step": 30, "tokens": None, "step_time_s": 1.0},
    ]
    course = make_course(tables_of(rows))
    knots = [values.tolist() for values in (course.steps, course.tokens, course.hours)]
    assert knots == [[0.0, 10.0, 20.0], [0.0, 100.0, 200.0], [0.0, 10.0, 15.0]]
    assert (course.hours_at(15), course.tokens_at(5), course.hours_at(math.inf)) == (12.5, 50.0, 15.0)
    assert seconds_of_step({"loss": np.ones(1)}) is None


def test_hours_of_steps_before_a_resumption_are_those_of_their_own_pace():
    rows = [{"step": step, "tokens": 1.0, "step_time_s": pace} for step, pace in ((10, 360.0), (20, 3600.0))]
    assert make_course(tables_of(rows), [18]).hours == pytest.approx([0.0, 1.0, 1.0 + 0.8 + 2.0])
    assert make_course(tables_of(rows), [10, 4, 30]).hours.tolist() == [0.0, 1.0, 11.0]
