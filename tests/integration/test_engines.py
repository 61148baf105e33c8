"""Every engine, ZeRO stage and precision computes the same training, on real gloo ranks."""

import math

import pytest

from tests.helpers.ranks import run_in_ranks
from tests.integration import workers

STAGES_FP32 = [["deepspeed", stage, "fp32"] for stage in range(4)]
STAGES_BF16 = [["deepspeed", stage, "bf16"] for stage in range(4)]
STEPS = 20


@pytest.fixture(scope="module")
def reference() -> list[list[float]]:
    """[loss, grad norm] of each step: one process, one big batch, float64, torch alone."""
    return workers.bare_float64(STEPS)


def test_one_process_without_an_engine_trains_like_the_reference(reference):
    cases = [["single", 0, "fp32"]]
    (((rows,),),) = [
        run_in_ranks("tests.integration.workers:losses_of", 1, {"cases": cases, "steps": STEPS, "micro": 4})
    ]
    for row, expected in zip(rows, reference, strict=True):
        assert row[:2] == pytest.approx(expected, rel=1e-4)


def test_every_zero_stage_and_ddp_on_two_ranks_trains_like_one_process(reference):
    cases = [*STAGES_FP32, ["ddp", 0, "fp32"]]
    # micro 2 of 6 rows a rank: three accumulation steps, with targets spread unevenly over ranks and micro-batches.
    ranks = run_in_ranks("tests.integration.workers:losses_of", 2, {"cases": cases, "steps": STEPS, "micro": 2})
    assert ranks[0] == ranks[1], "all ranks must see the same global loss and gradient norm"
    for case, rows in zip(cases, ranks[0], strict=True):
        for step, (row, expected) in enumerate(zip(rows, reference, strict=True)):
            assert row[0] == pytest.approx(expected[0], rel=1e-4), (case, step)
            assert row[1] == pytest.approx(expected[1], rel=1e-3), (case, step)
    assert reference[-1][0] < reference[0][0] - 0.1


def test_an_encoder_decoder_trains_alike_at_every_zero_stage_and_on_one_process():
    stages = [*STAGES_FP32, ["ddp", 0, "fp32"]]
    alone = run_in_ranks(
        "tests.integration.workers:two_stacks_losses", 1, {"cases": [["single", 0, "fp32"]], "steps": 6, "micro": 12}
    )[0][0]
    for rows in run_in_ranks(
        "tests.integration.workers:two_stacks_losses", 2, {"cases": stages, "steps": 6, "micro": 2}
    )[0]:
        for row, expected in zip(rows, alone, strict=True):
            # fp32 sums in another order, fed back through six steps of Adam.
            assert row[:2] == pytest.approx(expected[:2], rel=1e-3)
    assert alone[-1][0] < alone[0][0]


def test_parameters_cut_up_one_by_one_train_bit_for_bit_like_whole_ones():
    results = run_in_ranks(
        "tests.integration.workers:sharded_losses", 2, {"precisions": ["fp32", "bf16"], "steps": 4, "micro": 3}
    )
    for sharded, whole in results[0]:
        assert sharded == whole


def test_a_rank_never_holds_more_than_its_share_and_one_parameter():
    for total, largest, peak in run_in_ranks("tests.integration.workers:sharded_peak", 2, {}):
        assert peak <= total / 2 * 1.02 + largest


@pytest.mark.long
def test_compiled_blocks_train_alike_at_every_zero_stage_with_no_hook_inside_a_graph(reference):
    results = run_in_ranks(
        "tests.integration.workers:compiled_losses", 2, {"stages": [0, 2, 3], "steps": 3, "micro": 2}, timeout_s=400
    )
    for stages, graph_breaks in results:
        assert graph_breaks == 0
        for rows in stages:
            for row, expected in zip(rows, reference, strict=False):
                assert row[:2] == pytest.approx(expected, rel=1e-3)


def test_bf16_stages_agree_with_each_other_and_follow_fp32(reference):
    (results, _) = run_in_ranks(
        "tests.integration.workers:losses_of", 2, {"cases": STAGES_BF16, "steps": STEPS, "micro": 6}
    )
    for case, rows in zip(STAGES_BF16, results, strict=True):
        for step, (row, expected) in enumerate(zip(rows, reference, strict=True)):
            # bf16 has 8 bits of mantissa: 2**-8 a rounding, which 20 steps of feedback amplify.
            assert row[0] == pytest.approx(expected[0], rel=2e-2), (case, step)


def test_a_non_finite_gradient_on_one_rank_changes_nothing_on_any():
    cases = [*STAGES_FP32, *STAGES_BF16, ["ddp", 0, "fp32"]]
    for results in run_in_ranks("tests.integration.workers:poisoned", 2, {"cases": cases}):
        for case, (rows, unchanged) in zip(cases, results, strict=True):
            assert [row[2] for row in rows] == [0.0, 0.0, 1.0, 0.0], case
            assert not math.isfinite(rows[2][1]), case
            assert unchanged, case
            assert math.isfinite(rows[3][0]), case
