"""Curves of a bounded size: what is left out of a drawing is never an extreme."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.report.series import PARTS, interpolate, make_course, make_curve, median, seconds_of_step
from pretrain.tracking import timeline

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300)


def test_the_parts_of_a_step_are_those_of_the_tracker():
    assert PARTS == timeline.PARTS


def test_a_curve_of_few_rows_is_the_rows():
    curve = make_curve([(1, 5.0), (2, math.nan), (3, 6.0)], 2)
    assert (curve.xs, curve.means, curve.is_grouped) == ([1, 3], [5.0, 6.0], False)
    assert (curve.lost, curve.num_rows, curve.num_lost) == ([2], 2, 1)


@settings(max_examples=50)
@given(VALUES, st.integers(1, 50))
def test_a_grouped_curve_keeps_extremes_and_the_mean_of_all(values, max_groups):
    curve = make_curve(list(enumerate(values)), max_groups)
    assert len(curve.xs) <= max(max_groups, 1) and curve.xs == sorted(curve.xs)
    assert min(curve.lows or curve.means) == min(values) and max(curve.highs or curve.means) == max(values)
    for low, mean, high in zip(curve.lows, curve.means, curve.highs, strict=curve.is_grouped):
        # A mean is rounded once.
        assert low - 1e-9 * abs(low) <= mean <= high + 1e-9 * abs(high)


def test_one_spike_in_a_month_is_in_the_curve():
    points = [(step, 2.0) for step in range(100_000)]
    points[54_321] = (54_321, 99.0)
    curve = make_curve(points, 400)
    assert len(curve.xs) == 400 and curve.num_rows == 100_000
    assert max(curve.highs) == 99.0 and sum(high > 2.0 for high in curve.highs) == 1


def test_rows_of_one_step_are_one_group():
    curve = make_curve([(5, float(value)) for value in range(10)], 3)
    assert (curve.xs, curve.lows, curve.highs) == ([5], [0.0], [9.0])


def test_hours_add_up_the_time_of_steps_and_the_parts_go_first():
    rows = [
        {"step": 10, "tokens": 100.0, "step_time_s": 3600.0},
        {"step": 10, "val_loss": 1.0},
        {"step": 20, "tokens": 200.0, "step_time_s": 1.0, "forward_s": 1000.0, "evaluation_s": 800.0},
        {"step": 30, "tokens": None, "step_time_s": 1.0},
    ]
    course = make_course(rows)
    assert (course.steps, course.tokens, course.hours) == ([0.0, 10, 20], [0.0, 100.0, 200.0], [0.0, 10.0, 15.0])
    assert (course.hours_at(15), course.tokens_at(5), course.hours_at(99)) == (12.5, 50.0, 15.0)
    assert seconds_of_step({"loss": 1.0}) is None


def test_a_thinned_course_keeps_both_ends():
    course = make_course([{"step": step, "tokens": 2.0 * step, "step_time_s": 1.0} for step in range(1, 5000)])
    thin = course.thinned(10)
    assert len(thin.steps) == 10 and (thin.steps[0], thin.steps[-1]) == (0.0, 4999)
    assert thin.tokens_at(1234) == course.tokens_at(1234)


@given(st.integers(-5, 45))
def test_between_knots_is_a_straight_line(x):
    assert interpolate([0, 10, 40], [0, 100, 400], x) == min(max(10 * x, 0), 400)


def test_the_median_is_a_value():
    assert (median([3.0, 1.0, 2.0]), median([])) == (2.0, None)
