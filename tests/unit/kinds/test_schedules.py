"""The schedule against its closed forms, and the properties that hold for every one."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.config.data import BatchConfig
from pretrain.config.optim import EmaConfig, ScheduleConfig

FALLING = ["cosine", "linear", "wsd"]
"""Shapes that reach `min_ratio` at their end."""
WARMUP = st.integers(0, 50)


@st.composite
def schedules(draw, kinds=(*FALLING, "constant", "inverse_sqrt")):
    kind, warmup = draw(st.sampled_from(kinds)), draw(WARMUP)
    values = {"kind": kind, "warmup_steps": warmup, "min_ratio": draw(st.floats(0, 1))}
    if kind in FALLING:
        values["decay_steps"] = draw(st.none() | st.integers(warmup + 1, 300))
    if kind == "inverse_sqrt":
        values["hold_steps"] = draw(st.integers(1, 80))
    if kind == "wsd":
        longest = (values["decay_steps"] or 60) - warmup
        values |= {"cooldown_steps": draw(st.integers(1, longest))}
        values |= {"cooldown_shape": draw(st.sampled_from(["linear", "1-sqrt"]))}
    return ScheduleConfig(**values)


def factors(schedule: ScheduleConfig, total_steps: int, steps: range) -> list[float]:
    return [schedule.factor(step, total_steps) for step in steps]


def test_warmup_rises_linearly_from_one_part_at_step_0_to_the_peak():
    schedule = ScheduleConfig(warmup_steps=4)
    assert factors(schedule, 100, range(5)) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_no_warmup_starts_at_the_peak():
    assert ScheduleConfig().factor(0, 10) == 1.0


def test_cosine_at_quarter_half_and_end():
    schedule = ScheduleConfig(kind="cosine", min_ratio=0.2)
    expected = [0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * part)) for part in (0.25, 0.5, 1.0)]
    assert [schedule.factor(step, 100) for step in (25, 50, 100)] == expected
    assert expected[1:] == [pytest.approx(0.6, abs=1e-15), 0.2]


def test_linear_falls_in_equal_steps():
    schedule = ScheduleConfig(kind="linear", warmup_steps=2, min_ratio=0.0)
    assert factors(schedule, 6, range(2, 7)) == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_constant_stays_at_the_peak():
    schedule = ScheduleConfig(kind="constant", warmup_steps=1, min_ratio=0.5)
    assert set(factors(schedule, 10, range(20))) == {1.0}


def test_decay_steps_overrides_the_length_of_the_run():
    schedule = ScheduleConfig(kind="linear", min_ratio=0.0, decay_steps=10)
    assert schedule.factor(5, 1000) == 0.5
    assert schedule.factor(10, 1000) == 0.0


@pytest.mark.parametrize(("width", "warmup"), [(512, 4000), (1024, 4000), (128, 10)])
def test_inverse_sqrt_is_equation_3_of_the_2017_paper(width, warmup):
    schedule = ScheduleConfig(kind="inverse_sqrt", warmup_steps=warmup, min_ratio=0.0)
    peak = (width * warmup) ** -0.5
    for number in (1, 2, warmup - 1, warmup, warmup + 1, 7 * warmup, 100 * warmup):
        paper = width**-0.5 * min(number**-0.5, number * warmup**-1.5)
        assert peak * schedule.factor(number - 1, 10) == pytest.approx(paper, rel=1e-14)


def test_inverse_sqrt_with_a_hold_is_that_of_t5():
    schedule = ScheduleConfig(kind="inverse_sqrt", hold_steps=10_000, min_ratio=0.0)
    for number in (1, 500, 9_999, 10_000, 10_001, 40_000, 2**19):
        paper = 1 / math.sqrt(max(number, 10_000))
        assert 0.01 * schedule.factor(number - 1, 10) == pytest.approx(paper, rel=1e-14)


def test_inverse_sqrt_falls_to_its_least_ratio_and_no_further():
    schedule = ScheduleConfig(kind="inverse_sqrt", warmup_steps=10, min_ratio=0.5)
    assert schedule.factor(39, 10) == 0.5
    assert schedule.factor(10**6, 10) == 0.5


def test_wsd_cools_down_linearly_over_its_last_steps():
    schedule = ScheduleConfig(kind="wsd", warmup_steps=2, cooldown_steps=4, min_ratio=0.0)
    assert factors(schedule, 10, range(12)) == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0]


def test_wsd_cools_down_by_one_minus_the_root_of_its_progress():
    schedule = ScheduleConfig(kind="wsd", cooldown_steps=4, cooldown_shape="1-sqrt", min_ratio=0.0)
    expected = [1.0, 1 - math.sqrt(0.25), 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0.0]
    assert factors(schedule, 6, range(2, 7)) == expected


@given(schedules(kinds=["wsd"]), st.integers(60, 400), st.integers(1, 500), st.integers(1, 60))
def test_the_stable_phase_of_wsd_does_not_know_where_its_cooldown_will_be(schedule, total_steps, more, cooldown):
    """So a run goes on from any checkpoint of it: longer, or cooled down at once, as if it had been planned so."""
    end = schedule.decay_steps or total_steps
    start = end - schedule.cooldown_steps
    longer = schedule.model_copy(update={"decay_steps": end + more})
    assert factors(longer, total_steps, range(start)) == factors(schedule, total_steps, range(start))
    now = schedule.model_copy(update={"decay_steps": start + cooldown, "cooldown_steps": cooldown})
    assert factors(now, total_steps, range(start)) == factors(schedule, total_steps, range(start))
    fall = factors(now, total_steps, range(start, start + cooldown + 1))
    assert (fall[0], fall[-1]) == (1.0, schedule.min_ratio)
    assert fall == sorted(fall, reverse=True)


@given(schedules(), st.integers(60, 400))
def test_it_never_leaves_its_bounds_and_never_falls_before_or_rises_after_the_peak(schedule, total_steps):
    seen = factors(schedule, total_steps, range(500))
    warmup = schedule.warmup_steps
    assert all(0 < factor <= 1 for factor in seen[:warmup])
    assert all(schedule.min_ratio <= factor <= 1 for factor in seen[warmup:])
    assert seen[:warmup] == sorted(seen[:warmup])
    assert seen[warmup:] == sorted(seen[warmup:], reverse=True)
    assert max(seen) == 1.0


@given(schedules(), st.integers(60, 400))
def test_from_step_to_step_it_moves_no_more_than_its_steepest_part(schedule, total_steps):
    """Continuity: no jump where one part meets the next."""
    seen = [0.0, *factors(schedule, total_steps, range(500))]
    end = schedule.decay_steps or total_steps
    falls = {
        "constant": 0.0,
        "linear": 1 / (end - schedule.warmup_steps),
        "cosine": math.pi / 2 / (end - schedule.warmup_steps),
        "inverse_sqrt": 0.5 / max(schedule.warmup_steps, schedule.hold_steps or 0, 1),
        # The root is steepest at its first step.
        "wsd": (schedule.cooldown_steps or 1) ** (-1.0 if schedule.cooldown_shape == "linear" else -0.5),
    }
    rise = 1 / schedule.warmup_steps if schedule.warmup_steps else 1.0
    for before, after in itertools.pairwise(seen):
        assert -falls[schedule.kind] - 1e-12 <= after - before <= rise + 1e-12


@given(schedules(kinds=FALLING), st.integers(60, 400), st.integers(0, 100))
def test_after_its_end_it_stays_at_the_final_value(schedule, total_steps, beyond):
    end = schedule.decay_steps or total_steps
    assert schedule.factor(end + beyond, total_steps) == schedule.min_ratio


@given(WARMUP.filter(bool), st.integers(60, 200), st.integers(1, 5000), st.data())
def test_positions_by_token_are_those_by_step_rounded_up(warmup, decay, tokens_per_step, data):
    part = st.integers(0, tokens_per_step - 1)
    by_step = ScheduleConfig(kind="wsd", warmup_steps=warmup, decay_steps=decay, cooldown_steps=7)
    by_token = ScheduleConfig(
        kind="wsd",
        warmup_tokens=warmup * tokens_per_step - data.draw(part),
        decay_tokens=decay * tokens_per_step - data.draw(part),
        cooldown_tokens=7 * tokens_per_step - data.draw(part),
    )
    batch = BatchConfig(global_tokens=tokens_per_step, seq_len=1, micro=1)
    assert by_token.in_steps(batch, 1000) == by_step


def test_a_schedule_by_token_asks_for_tokens_per_step():
    with pytest.raises(AssertionError, match="to steps first"):
        ScheduleConfig(warmup_tokens=100).factor(0, 10)


def test_the_average_forgets_its_beginning_and_then_has_its_horizon():
    thousand = EmaConfig(horizon_steps=1000)
    assert thousand.decay(0, 1) == 0.1
    assert thousand.decay(90, 1) == 0.91
    assert thousand.decay(10**5, 1) == pytest.approx(0.999, abs=1e-6)


def test_a_horizon_in_tokens_is_the_same_for_any_batch():
    """Busbridge et al. 2023: two steps of half the tokens keep as much as one of all."""
    config = EmaConfig(horizon_tokens=10**6)
    one = config.decay(10**6, 4096)
    assert one == pytest.approx(math.exp(-4096 / 10**6))
    assert config.decay(10**6, 2048) ** 2 == pytest.approx(one)


def test_a_horizon_is_given_once():
    with pytest.raises(ValueError, match="horizon_steps=5 and horizon_tokens=7 say the same thing; keep one of them"):
        EmaConfig(horizon_steps=5, horizon_tokens=7)
