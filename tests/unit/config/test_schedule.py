"""What a schedule's config refuses, and how it says so."""

import pytest
from pydantic import ValidationError

from pretrain.config.data import BatchConfig
from pretrain.config.optim import ScheduleConfig

BATCH = BatchConfig(global_tokens=100, seq_len=10, micro=1)


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
    ("values", "message"),
    [
        ({"warmup_steps": 20}, r"optim.schedule.warmup_steps=20 must be less than the 20 steps of the schedule; lower"),
        ({"warmup_tokens": 2000}, r"optim.schedule.warmup_tokens=2000 must be less than the 20 steps"),
        (
            {"kind": "wsd", "warmup_steps": 5, "cooldown_tokens": 1501},
            r"warm-up of 5 steps and the cooldown of 16 are longer than the 20 steps .*optim.schedule.cooldown_tokens",
        ),
    ],
)
def test_a_schedule_that_is_longer_than_its_run_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        ScheduleConfig(**values).check_run(20, BATCH)


def test_a_schedule_that_just_fits_its_run_is_taken():
    ScheduleConfig(kind="wsd", warmup_steps=5, cooldown_tokens=1500).check_run(20, BATCH)
    ScheduleConfig(warmup_tokens=1900).check_run(20, BATCH)


def test_a_dumped_schedule_is_read_back():
    schedule = ScheduleConfig(kind="wsd", warmup_tokens=7, cooldown_tokens=9)
    assert ScheduleConfig(**schedule.model_dump()) == schedule
