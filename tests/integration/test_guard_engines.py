"""What the guard asks of every engine and stage: steps that leave no trace, and the cause of one that went wrong."""

import re
from typing import Any

import pytest

from tests.helpers.ranks import run_in_ranks

STAGES = [["deepspeed", stage, precision] for precision in ("fp32", "bf16") for stage in range(4)]
OTHERS = [["ddp", 0, "fp32"], ["deepspeed", 2, "fp32", "adamw", "optimizer"], ["deepspeed", 3, "bf16", "muon"]]
OTHERS += [["ddp", 0, "fp32", kind] for kind in ("adafactor", "lion", "soap")]
# One of each way in which a step is dropped.
FAST = [STAGES[4], STAGES[2], STAGES[7], OTHERS[0]]
EXPECTED = {
    "output": "the first output that is not finite is that of decoder.blocks.1.feedforward on rank 1",
    "gradient": "every output is finite, and the gradient overflows: first that of "
    "decoder.blocks.1.feedforward.down.weight on rank 1",
    "weight": "the weight decoder.blocks.0.attention_norm.weight is not finite on rank 1",
    "none": "run again, outputs and gradients are finite: their sum overflows, or the hardware erred",
}
SHARDED = "every output is finite: the gradient overflows"


def assert_no_trace(cases: list[list[Any]], results: list[list[Any]]) -> None:
    """Steps dropped and rehearsed in between changed nothing, then or later."""
    for case, (rows, plain, skipped, unchanged, (before, after)) in zip(cases, results, strict=True):
        assert skipped, case
        assert unchanged, case
        assert repr(rows) == repr(plain), case  # those of fp16 that overflow have no number
        assert before == after, "the loss scale of fp16"


def assert_found(cases: list[list[Any]], results: list[list[Any]]) -> None:
    """Every kind of damage on rank 1 was named, and looking for it changed nothing."""
    for case, answers in zip(cases, [results[n : n + 4] for n in range(0, len(results), 4)], strict=True):
        for kind, (fault, unchanged) in zip(EXPECTED, answers, strict=True):
            is_hidden = case[1] == 3 and kind in ("gradient", "none")
            assert fault["what"] == (SHARDED if is_hidden else EXPECTED[kind]), (case, kind)
            assert unchanged or kind == "weight", (case, kind)
            assert fault["rank"] == (None if is_hidden or kind == "none" else 1)
            assert fault["name"] is None or fault["name"] in fault["what"]


@pytest.mark.long
def test_a_dropped_step_leaves_no_trace_and_the_first_that_is_not_finite_is_named_with_its_rank():
    arguments = {"cases": FAST, "kinds": list(EXPECTED)}
    for dropped, faults in run_in_ranks("tests.integration.guard_workers:dropped_and_faults", 2, arguments):
        assert_no_trace(FAST, dropped)
        assert_found(FAST, faults)


@pytest.mark.long
def test_the_same_at_every_zero_stage_and_precision():
    cases = [*STAGES, *OTHERS]
    arguments = {"cases": cases, "kinds": list(EXPECTED)}
    for dropped, faults in run_in_ranks(
        "tests.integration.guard_workers:dropped_and_faults", 2, arguments, timeout=None
    ):
        assert_no_trace(cases, dropped)
        assert_found(cases, faults)


@pytest.mark.long
def test_a_step_that_is_dropped_leaves_the_loss_scale_of_fp16_alone():
    """Run on a CPU, where DeepSpeed has to be told to; its first steps overflow, and are compared all the same."""
    cases = [["deepspeed", stage, "fp16"] for stage in (2, 3)]
    for results in run_in_ranks("tests.integration.guard_workers:dropped", 2, {"cases": cases}, timeout=None):
        assert_no_trace(cases, results)


@pytest.mark.long
def test_a_gradient_that_overflows_at_the_least_loss_scale_is_skipped_like_others():
    """DeepSpeed would end the process by an exception of no type; so `optim.max_bad_steps` decides."""
    ((skipped, scale),) = run_in_ranks("tests.integration.guard_workers:at_the_least_scale", 1, {})
    assert skipped == [True] * 18
    assert scale == 1.0


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
