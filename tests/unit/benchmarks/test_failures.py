"""The simulated months of failures against Daly's closed form, and against what follows from it."""

import random
from dataclasses import replace

import pytest

from benchmarks.failures import HOUR_S, Operation, best, expected_goodput, goodput, months, mtbf_s
from pretrain.plan.course import daly_interval

JOB = Operation(mtbf_s(16_384), 1200.0, 60.0, 60.0)
YEARS_S = 40_000 * HOUR_S
"""Some 15,000 failures: means are known to about half a per cent of what is lost."""


@pytest.mark.parametrize("interval_s", [120.0, 1200.0, 7200.0])
@pytest.mark.parametrize("restart_s", [60.0, 3600.0])
def test_a_long_run_has_the_goodput_of_the_closed_form(interval_s, restart_s):
    one = replace(JOB, interval_s=interval_s, restart_s=restart_s)
    assert goodput(one, YEARS_S, random.Random(0)) == pytest.approx(expected_goodput(one), rel=0.01)


def test_the_closed_form_is_that_of_young_where_failures_are_rare():
    one = replace(JOB, mtbf_s=1e6, restart_s=100.0, interval_s=2000.0)
    first_order = 1 - (60 / 2000 + 1000 / 1e6 + 100 / 1e6)
    assert expected_goodput(one) == pytest.approx(first_order, abs=0.002)


def test_no_interval_is_better_than_that_of_daly():
    """Simulated with the same failures, a third and three times of it lose, and so they do in the closed form."""
    at_best = best(JOB)
    assert at_best.interval_s == daly_interval(60.0, JOB.mtbf_s)
    for factor in (1 / 3, 3):
        other = replace(at_best, interval_s=factor * at_best.interval_s)
        assert goodput(other, YEARS_S, random.Random(1)) < goodput(at_best, YEARS_S, random.Random(1))
    for factor in (0.97, 1.03):
        other = replace(at_best, interval_s=factor * at_best.interval_s)
        assert expected_goodput(other) <= expected_goodput(at_best) + 1e-6


def test_without_spares_each_failure_costs_a_repair_more():
    one = replace(JOB, spares=0, hardware=1.0, repair_s=5 * HOUR_S)
    wanted = expected_goodput(one) / (1 + one.repair_s / one.mtbf_s)
    assert goodput(one, 3 * YEARS_S, random.Random(2)) == pytest.approx(wanted, rel=0.015)


def test_spares_for_all_cost_nothing_and_more_of_them_never_do():
    found = [months(replace(JOB, spares=spares), 5)[0] for spares in (0, 8, 100)]
    assert found == sorted(found) and found[0] < 0.5 * found[2]
    assert found[2] == months(JOB, 5)[0]


def test_a_save_beside_training_costs_its_stall_and_what_is_not_yet_written():
    """Per failure a half interval and the time of writing are lost: more than a stall alone, less than blocking."""
    beside = replace(JOB, stall_s=2.0, write_s=60.0)
    waiting = replace(JOB, stall_s=60.0, write_s=60.0)
    instant = replace(JOB, stall_s=2.0, write_s=2.0)
    three = [goodput(one, YEARS_S, random.Random(3)) for one in (waiting, beside, instant)]
    assert three == sorted(three) and three[0] < three[1] < three[2]


def test_a_run_without_failures_loses_its_saves_only():
    assert goodput(replace(JOB, mtbf_s=1e15), 1260.0 * 1000, random.Random(4)) == pytest.approx(1200 / 1260)
