"""How a global batch is cut up, and what is said where it does not divide."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pretrain.config.data import BatchConfig, BatchPlan, StepRows, plan_batch
from pretrain.config.load import load_config
from pretrain.config.optim import ScheduleConfig
from pretrain.errors import ConfigError


def test_a_batch_is_cut_over_ranks_and_accumulation():
    assert plan_batch(BatchConfig(global_tokens=4096, seq_len=256, micro=2), 4) == BatchPlan(16, 4, 2, 2)


def test_what_does_not_divide_names_the_nearest_that_do():
    with pytest.raises(ConfigError) as caught:
        plan_batch(BatchConfig(global_tokens=100000, seq_len=512, micro=8), 4)
    assert str(caught.value) == (
        "batch.global_tokens=100000 must be a multiple of seq_len 512 x micro 8 x ranks 4 = 16384; use 98304 or 114688"
    )


def test_a_batch_smaller_than_one_micro_batch_a_rank_names_the_smallest_that_is_not():
    with pytest.raises(ConfigError, match=r"= 16384; use 16384$"):
        plan_batch(BatchConfig(global_tokens=512, seq_len=512, micro=8), 4)


@pytest.mark.parametrize("later", [False, True])
def test_a_batch_that_no_run_has_is_refused(later):
    """`plan` would try its divisors without end."""
    sizes = {"global_tokens": 2**62, "schedule": []}
    if later:
        sizes = {"global_tokens": 512, "schedule": [{"tokens": 4096, "global_tokens": 2**62}]}
    with pytest.raises(ValidationError, match=r"global_tokens\s+Input should be less than or equal to 1099511627776"):
        BatchConfig.model_validate({**sizes, "seq_len": 512, "micro": 1})


@given(st.integers(1, 10**6), st.integers(1, 512), st.integers(1, 16), st.integers(1, 64))
def test_every_row_of_a_batch_is_run_once(global_tokens, seq_len, micro, world_size):
    batch = BatchConfig(global_tokens=global_tokens, seq_len=seq_len, micro=micro)
    try:
        plan = plan_batch(batch, world_size)
    except ConfigError:
        assert global_tokens % (seq_len * micro * world_size)
    else:
        assert plan.rows * seq_len == global_tokens
        assert plan.rows_per_rank * world_size == plan.rows
        assert plan.accumulation * plan.micro == plan.rows_per_rank


def growing(*sizes: tuple[int, int], seq_len: int = 10, first: int = 100) -> BatchConfig:
    """A batch whose (tokens, global_tokens) are `sizes`, after `first`."""
    schedule = [{"tokens": tokens, "global_tokens": size} for tokens, size in sizes]
    return BatchConfig.model_validate({"global_tokens": first, "seq_len": seq_len, "micro": 1, "schedule": schedule})


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 60)), min_size=1, max_size=4))
def test_the_rows_of_each_step_are_those_of_the_last_size_that_applies(stages):
    """By a walk over the steps: each takes the last size whose rows have been read when it begins."""
    sizes, after = [], 0
    for rows, length in stages:
        sizes.append((rows, after))
        after += length
    steps, done = StepRows(sizes), 0
    for step in range(50):
        rows = [size for size, begin in sizes if begin <= done][-1]
        assert (steps.at(step), steps.before(step)) == (rows, done)
        assert {steps.step_of(row) for row in range(done, done + rows)} == {step}
        assert {steps.steps_for(number) for number in range(done + 1, done + rows + 1)} == {step + 1}
        done += rows
    assert steps.steps_for(0) == 0


def test_positions_of_a_learning_rate_schedule_in_tokens_are_steps_of_a_growing_batch():
    batch = growing((300, 200), (1000, 400))  # steps of 3 x 100, 4 x 200 (up to 1100 tokens), then 400 tokens
    given = ScheduleConfig(kind="wsd", warmup_tokens=301, decay_tokens=1900, cooldown_tokens=1000)
    steps = given.in_steps(batch, total_steps=50)
    assert (steps.warmup_steps, steps.decay_steps) == (4, 9)
    assert steps.cooldown_steps == 3, "two of 400 tokens before the end, and one of 200"
    assert ScheduleConfig(kind="wsd", cooldown_tokens=800).in_steps(batch, 9).cooldown_steps == 2
    longer = ScheduleConfig(kind="wsd", cooldown_tokens=2000)
    assert longer.in_steps(batch, 9).cooldown_steps == 9
    assert longer.shortened(batch, 9)[0].startswith("the cooldown of 10 steps is cut to 9, "), "one too many"


def test_every_size_of_a_growing_batch_divides_over_the_ranks():
    with pytest.raises(ConfigError) as caught:
        plan_batch(growing((1000, 300), (2000, 450), first=200), 2)
    assert str(caught.value) == (
        "batch.schedule.1.global_tokens=450 must be a multiple of seq_len 10 x micro 1 x ranks 2 = 20; use 440 or 460"
    )
    assert growing((1000, 300), (2000, 450), first=200).common_rows == 5
    plan = plan_batch(growing((1000, 400), first=200), 4)
    assert (plan.rows, plan.rows_per_rank, plan.accumulation, plan.steps.at(5)) == (20, 5, 5, 40)


def test_milestones_of_a_batch_ascend():
    with pytest.raises(ValueError, match=r"schedule: tokens must ascend, not \[500, 500\]"):
        growing((500, 200), (500, 300))


def test_short_rows_are_parts_of_whole_ones_of_text():
    short = [{"until_tokens": 150, "seq_len": 2}, {"until_tokens": 400, "seq_len": 5}]
    values = {"global_tokens": 100, "seq_len": 10, "micro": 1, "schedule": [{"tokens": 200, "global_tokens": 200}]}
    batch = BatchConfig.model_validate({**values, "short_rows": short})
    assert [batch.length_at(step) for step in range(5)] == [2, 2, 5, 10, 10], "from 0, 100, 200, 400 and 600 tokens on"
    with pytest.raises(ValueError, match=r"short_rows: seq_len=4 must be a part of batch\.seq_len=10, whose rows are"):
        BatchConfig.model_validate({**values, "short_rows": [{"until_tokens": 100, "seq_len": 4}]})
    with pytest.raises(ValueError, match=r"short_rows: seq_len=10 must be a part of batch\.seq_len=10"):
        BatchConfig.model_validate({**values, "short_rows": [{"until_tokens": 100, "seq_len": 10}]})
    with pytest.raises(ValueError, match=r"short_rows: until_tokens must ascend, not \[150, 150\]"):
        BatchConfig.model_validate({**values, "short_rows": [short[0], {"until_tokens": 150, "seq_len": 5}]})


def test_short_windows_hide_something_and_ascend():
    values = {"global_tokens": 100, "seq_len": 10, "micro": 1}
    short = [{"until_tokens": 150, "window": 2}, {"until_tokens": 300, "window": 1}]
    batch = BatchConfig.model_validate({**values, "short_windows": short})
    assert [batch.window_at(step) for step in range(4)] == [2, 2, 1, None]
    with pytest.raises(ValueError, match=r"short_windows: until_tokens must ascend, not \[300, 150\]"):
        BatchConfig.model_validate({**values, "short_windows": short[::-1]})
    with pytest.raises(ValueError, match="short_windows: window=10 hides nothing in rows of 10 tokens; use less"):
        BatchConfig.model_validate({**values, "short_windows": [{"until_tokens": 150, "window": 10}]})


@pytest.mark.parametrize(
    ("override", "found"),
    [("data.packing=bins", "objective.kind=causal and data.packing=bins"), ("objective.kind=prefix", "=prefix and")],
)
def test_short_rows_of_anything_but_text_are_refused(override, found):
    short = "batch.short_rows=[{until_tokens: 100, seq_len: 64}]"
    load_config("configs/run/quickstart.yaml", [short])
    with pytest.raises(ConfigError, match=f"batch.short_rows cuts rows of running text, .*{found}"):
        load_config("configs/run/quickstart.yaml", [short, override])
