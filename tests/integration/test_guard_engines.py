"""What the guard asks of every engine and ZeRO stage: a step dropped or rehearsed leaves no trace."""

import pytest

from tests.helpers.ranks import run_in_ranks

STAGES = [["deepspeed", stage, precision] for precision in ("fp32", "bf16") for stage in range(4)]
OTHERS = [["ddp", 0, "fp32"], ["deepspeed", 2, "fp32", "adamw", "optimizer"], ["deepspeed", 3, "bf16", "muon"]]
# One of each way in which a step is dropped.
FAST = [STAGES[4], STAGES[2], STAGES[7], OTHERS[0]]


@pytest.mark.parametrize("cases", [FAST, pytest.param([*STAGES, *OTHERS], marks=pytest.mark.long)], ids=["few", "all"])
def test_a_step_that_is_dropped_or_rehearsed_leaves_no_trace_at_any_zero_stage(cases):
    for results in run_in_ranks("tests.integration.guard_workers:dropped", 2, {"cases": cases}):
        for case, (rows, plain, skipped, unchanged, _) in zip(cases, results, strict=True):
            assert skipped, case
            assert unchanged, case
            assert rows == plain, case


@pytest.mark.long
def test_a_step_that_is_dropped_leaves_the_loss_scale_of_fp16_alone():
    cases = [["deepspeed", stage, "fp16"] for stage in (1, 2, 3)]
    for results in run_in_ranks("tests.integration.guard_workers:dropped", 2, {"cases": cases}):
        for case, (_, _, skipped, unchanged, (before, after)) in zip(cases, results, strict=True):
            assert skipped, case
            assert unchanged, case
            assert before == after, case
