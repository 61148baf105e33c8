"""How a global batch is cut up, and what is said where it does not divide."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.config.data import BatchConfig, BatchPlan, plan_batch
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
