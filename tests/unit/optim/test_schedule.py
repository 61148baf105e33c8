"""The schedule against its closed forms, and the properties that hold for every one."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.config.optim import ScheduleConfig
from pretrain.optim.schedule import learning_rate_factor


@st.composite
def schedules(draw):
    warmup = draw(st.integers(0, 50))
    return ScheduleConfig(
        kind=draw(st.sampled_from(["cosine", "linear", "constant"])),
        warmup_steps=warmup,
        min_ratio=draw(st.floats(0, 1)),
        decay_steps=draw(st.none() | st.integers(warmup + 1, 300)),
    )


def test_warmup_rises_linearly_from_one_part_at_step_0_to_the_peak():
    schedule = ScheduleConfig(warmup_steps=4)
    assert [learning_rate_factor(step, schedule, 100) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_no_warmup_starts_at_the_peak():
    assert learning_rate_factor(0, ScheduleConfig(), 10) == 1.0


def test_cosine_at_quarter_half_and_end():
    schedule = ScheduleConfig(kind="cosine", min_ratio=0.2)
    expected = [0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * part)) for part in (0.25, 0.5, 1.0)]
    assert [learning_rate_factor(step, schedule, 100) for step in (25, 50, 100)] == expected
    assert expected[1:] == [pytest.approx(0.6, abs=1e-15), 0.2]


def test_linear_falls_in_equal_steps():
    schedule = ScheduleConfig(kind="linear", warmup_steps=2, min_ratio=0.0)
    assert [learning_rate_factor(step, schedule, 6) for step in range(2, 7)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_constant_stays_at_the_peak():
    schedule = ScheduleConfig(kind="constant", warmup_steps=1, min_ratio=0.5)
    assert {learning_rate_factor(step, schedule, 10) for step in range(20)} == {1.0}


def test_decay_steps_overrides_the_length_of_the_run():
    schedule = ScheduleConfig(kind="linear", min_ratio=0.0, decay_steps=10)
    assert learning_rate_factor(5, schedule, 1000) == 0.5
    assert learning_rate_factor(10, schedule, 1000) == 0.0


@given(schedules(), st.integers(60, 400))
def test_it_never_leaves_its_bounds_and_never_falls_before_or_rises_after_the_peak(schedule, total_steps):
    factors = [learning_rate_factor(step, schedule, total_steps) for step in range(500)]
    warmup = schedule.warmup_steps
    assert all(0 < factor <= 1 for factor in factors[:warmup])
    assert all(schedule.min_ratio <= factor <= 1 for factor in factors[warmup:])
    assert factors[:warmup] == sorted(factors[:warmup])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert factors[warmup] == 1.0


@given(schedules(), st.integers(60, 400), st.integers(0, 100))
def test_after_its_end_it_stays_at_the_final_value(schedule, total_steps, beyond):
    end = schedule.decay_steps or total_steps
    final = 1.0 if schedule.kind == "constant" else schedule.min_ratio
    assert learning_rate_factor(end + beyond, schedule, total_steps) == final
