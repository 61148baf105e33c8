"""What a schedule's config refuses, and how it says so."""

import pytest
from pydantic import ValidationError

from pretrain.config.data import BatchConfig
from pretrain.config.optim import ScheduleConfig
from pretrain.kinds.schedules import SCHEDULES

BATCH = BatchConfig(global_tokens=100, seq_len=10, micro=1)


def test_every_kind_has_a_record():
    assert set(ScheduleConfig.model_json_schema()["properties"]["kind"]["enum"]) == set(SCHEDULES)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"warmup_steps": 5, "warmup_tokens": 9}, "warmup_steps=5 and warmup_tokens=9 say the same thing; keep one"),
        ({"decay_steps": 5, "decay_tokens": 9}, "decay_steps=5 and decay_tokens=9 say the same thing"),
        ({"cooldown_steps": 5}, "cooldown_steps and cooldown_tokens belong to kind=wsd, not cosine; remove them"),
        ({"kind": "wsd", "cooldown_steps": 5, "hold_tokens": 5}, "hold_tokens belong to kind=inverse_sqrt, not wsd"),
        ({"cooldown_shape": "1-sqrt"}, "cooldown_shape belongs to kind=wsd, not cosine; remove it"),
        ({"kind": "wsd"}, "kind=wsd needs cooldown_steps or cooldown_tokens; a tenth"),
        ({"kind": "inverse_sqrt"}, "kind=inverse_sqrt needs warmup_steps .* or hold_steps=10000"),
        ({"kind": "constant", "decay_steps": 9}, "decay_steps and decay_tokens mean nothing under kind=constant"),
        ({"warmup_steps": 9, "decay_steps": 9}, "decay_steps=9 must exceed warmup_steps=9"),
        ({"warmup_tokens": 9, "decay_tokens": 8}, "decay_tokens=8 must exceed warmup_tokens=9"),
    ],
)
def test_contradictions_are_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        ScheduleConfig(**values)


@pytest.mark.parametrize(
    ("values", "steps", "cut"),
    [
        ({"warmup_steps": 20}, 20, (5, None)),
        ({"warmup_steps": 10}, 8, (2, None)),
        ({"warmup_tokens": 2000}, 20, (5, None)),
        ({"warmup_steps": 9, "kind": "inverse_sqrt"}, 9, (2, None)),
        ({"warmup_steps": 1}, 1, (0, None)),
        ({"warmup_steps": 30, "decay_tokens": 2900}, 50, (7, None)),
        ({"kind": "wsd", "warmup_steps": 5, "cooldown_tokens": 1501}, 20, (5, 15)),
        ({"kind": "wsd", "warmup_steps": 5, "cooldown_tokens": 9000}, 20, (5, 15)),
        ({"kind": "wsd", "cooldown_tokens": 2001}, 20, (0, 20)),
        ({"kind": "wsd", "warmup_steps": 100, "cooldown_steps": 200}, 8, (2, 6)),
    ],
)
def test_a_schedule_that_is_longer_than_its_run_is_cut_and_says_so(values, steps, cut):
    schedule = ScheduleConfig(**values)
    taken = schedule.in_steps(BATCH, steps)
    assert (taken.warmup_steps, taken.cooldown_steps) == cut
    factors = [taken.factor(step, steps) for step in range(steps)]
    assert max(factors) == 1
    assert min(factors) > 0
    what, fix = schedule.shortened(BATCH, steps)
    end = taken.decay_steps or steps
    assert what.endswith(f", as the schedule has {end} steps in all")
    assert fix.endswith(", or raise train.steps")
    overrides = fix.removeprefix("set ").removesuffix(", or raise train.steps").split()
    given = {
        key.removeprefix("optim.schedule."): int(value) for key, _, value in (one.partition("=") for one in overrides)
    }
    tokens = {name.replace("steps", "tokens"): None for name in given}
    assert ScheduleConfig(**{**schedule.model_dump(), **tokens, **given}).shortened(BATCH, steps) is None


def test_the_words_of_a_cut_name_both_positions():
    cut = ScheduleConfig(kind="wsd", warmup_steps=100, cooldown_steps=200).shortened(BATCH, 8)
    assert cut == (
        "the warm-up of 100 steps is cut to 2 and the cooldown of 200 steps is cut to 6, "
        "as the schedule has 8 steps in all",
        "set optim.schedule.warmup_steps=2 optim.schedule.cooldown_steps=6, or raise train.steps",
    )


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "wsd", "warmup_steps": 5, "cooldown_tokens": 1500},
        {"warmup_tokens": 1900},
        {"warmup_steps": 19},
        {"warmup_steps": 19, "decay_steps": 100},
        {"kind": "wsd", "cooldown_steps": 20},
    ],
)
def test_a_schedule_that_just_fits_its_run_is_as_it_was_asked_for(values):
    schedule = ScheduleConfig(**values)
    assert schedule.shortened(BATCH, 20) is None
    taken = schedule.in_steps(BATCH, 20).model_dump()
    assert all(taken[name] == value for name, value in values.items() if "tokens" not in name)


def test_a_dumped_schedule_is_read_back():
    schedule = ScheduleConfig(kind="wsd", warmup_tokens=7, cooldown_tokens=9)
    assert ScheduleConfig(**schedule.model_dump()) == schedule
