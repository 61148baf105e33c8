"""What the guard asks of every engine and ZeRO stage: a step dropped or rehearsed leaves no trace."""

import re

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


EXPECTED = {
    "output": "the first output that is not finite is that of decoder.blocks.1.feedforward on rank 1",
    "gradient": "every output is finite, and the gradient overflows: first that of "
    "decoder.blocks.1.feedforward.down.weight on rank 1",
    "weight": "the weight decoder.blocks.0.attention_norm.weight is not finite on rank 1",
    "none": "run again, outputs and gradients are finite: their sum overflows, or the hardware erred",
}
SHARDED = "every output is finite: the gradient overflows"


@pytest.mark.parametrize(
    "cases", [[STAGES[2], STAGES[7]], pytest.param([*STAGES, *OTHERS], marks=pytest.mark.long)], ids=["few", "all"]
)
def test_the_first_bad_module_weight_or_gradient_is_named_with_its_rank_at_every_zero_stage(cases):
    arguments = {"cases": cases, "kinds": list(EXPECTED)}
    for results in run_in_ranks("tests.integration.guard_workers:faults", 2, arguments):
        for case, answers in zip(cases, [results[n : n + 4] for n in range(0, len(results), 4)], strict=True):
            for kind, (fault, unchanged) in zip(EXPECTED, answers, strict=True):
                is_hidden = case[1] == 3 and kind in ("gradient", "none")
                assert fault["what"] == (SHARDED if is_hidden else EXPECTED[kind]), (case, kind)
                assert unchanged or kind == "weight", (case, kind)
                assert fault["rank"] == (None if is_hidden or kind == "none" else 1)
                assert fault["name"] is None or fault["name"] in fault["what"]


REPLICATED = [STAGES[0], STAGES[6], OTHERS[0]]


@pytest.mark.long
def test_of_two_ranks_both_are_named_when_their_weights_differ():
    for results in run_in_ranks("tests.integration.guard_workers:replicas", 2, {"cases": REPLICATED, "flipped": [1]}):
        for case, (before, after) in zip(REPLICATED, results, strict=True):
            assert before is None, case
            assert re.search(
                r"the weights of rank 0 on \S+ and rank 1 on \S+ differ at step 7, first "
                r"decoder\.blocks\.1\.feedforward_norm\.weight; no majority tells which is right; the last",
                after,
            ), case


@pytest.mark.long
def test_of_three_ranks_the_one_that_differs_is_named():
    for results in run_in_ranks("tests.integration.guard_workers:replicas", 3, {"cases": [STAGES[1]], "flipped": [1]}):
        ((before, after),) = results
        assert before is None
        assert re.match(r"the weights of rank 1 on \S+ differ at step 7, first .*; the other 2 agree; the last", after)
