"""A run by the clock."""

import math

from pretrain.report.charts import chart_style, draw_timeline, instant, place_points, place_starts
from pretrain.report.series import make_course
from tests.unit.report.run_folders import attempt, metric_row, tables_of, write_run
from tests.unit.report.test_page import read

HOUR = 1800
"""Steps: of these runs one takes 2 s."""


def run_of(tmp_path, attempts, steps):
    """A run with a row at each of the steps."""
    return read(write_run(tmp_path / "run", [metric_row(step) for step in steps], attempts=attempts))


def hours(run):
    """Where the rows of each start are put."""
    return [part.tolist() for _, part in place_points(place_starts(run), run.course, run.course.steps[1:])]


def test_rows_of_a_start_that_ended_are_counted_back_from_its_end(tmp_path):
    run = run_of(tmp_path, [attempt(1, 0, 2.5, 0)], [HOUR, 2 * HOUR])
    assert hours(run) == [[1.5, 2.5]]


def test_rows_of_a_start_that_goes_on_are_counted_on_from_its_beginning(tmp_path):
    run = run_of(tmp_path, [attempt(1, 0, 1, 0), attempt(2, 10, None, HOUR)], [HOUR, 2 * HOUR, 3 * HOUR])
    assert hours(run) == [[1.0], [11.0, 12.0]]


def test_rows_never_reach_into_the_next_start(tmp_path):
    # Two hours of steps in one hour: the clock was wrong somewhere, and bars stay in their order.
    run = run_of(tmp_path, [attempt(1, 0, None, 0), attempt(2, 1, 2, 2 * HOUR)], [HOUR, 2 * HOUR])
    assert hours(run) == [[0.5, 1.0], []]


def test_the_outcome_of_a_start_is_its_colour(tmp_path):
    attempts = [
        attempt(1, 0, 1, 0, exit_code=75, reason="SIGTERM"),
        attempt(2, 1, None, HOUR),
        attempt(3, 2, 3, HOUR, exit_code=76, reason="hang"),
        attempt(4, 3, 4, HOUR),
    ]
    starts = place_starts(run_of(tmp_path, attempts, [HOUR]))
    assert [start.outcome for start in starts] == ["stopped", "open", "failed", "done"]
    assert [(start.begin, start.end) for start in starts] == [(0.0, 1.0), (1.0, None), (2.0, 3.0), (3.0, 4.0)]


def test_times_that_are_none_are_left_out(tmp_path):
    run = run_of(tmp_path, [{"number": 1, "started": "soon"}], [1])
    assert place_starts(run) == [] and draw_timeline(run, "#000000") == ""
    assert instant(None) is None and instant("2026-03-01T08:00:00+02:00").hour == 6


def test_a_run_of_seconds_has_an_axis_of_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain.report.charts.to_image", lambda figure, name: figure)
    bars = draw_timeline(run_of(tmp_path, [attempt(1, 0, 5 / 3600, 0)], []), "#000000").axes[-1]
    assert (bars.get_xlabel(), bars.get_xlim()) == ("seconds since the first start", (0.0, 5.0))


def test_a_run_without_rows_has_its_bars(tmp_path):
    with chart_style():
        assert draw_timeline(run_of(tmp_path, [attempt(1, 0, 1, 0)], []), "#000000").startswith("<img")


def test_the_course_ends_where_the_rows_do():
    assert make_course(tables_of([metric_row(HOUR)])).hours_at(math.inf) == 1.0
