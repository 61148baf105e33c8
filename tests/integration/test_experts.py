"""Mixtures of experts on real ranks: every engine trains like one process, starved experts too, and resumes."""

import pytest

from tests.helpers.ranks import run_in_ranks

WORKERS = "tests.integration.experts_workers"
ZERO = [["deepspeed", stage, "fp32"] for stage in range(4)]
ALONE = ["single", 0, "fp32"]
STEPS = 20


def assert_close(rows, expected, *, loss=1e-5, norm=1e-4):
    """Rows of [loss, gradient norm, skipped]."""
    assert len(rows) == len(expected)
    for step, (row, wanted) in enumerate(zip(rows, expected, strict=True)):
        assert row[0] == pytest.approx(wanted[0], rel=loss), step
        assert row[1] == pytest.approx(wanted[1], rel=norm), step
        assert row[2] == wanted[2] == 0


def trained(world_size, cases, steps, micro):
    """Rows and final balance of each case; all ranks agree."""
    ranks = run_in_ranks(f"{WORKERS}:losses_of", world_size, {"cases": cases, "steps": steps, "micro": micro})
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


@pytest.mark.parametrize("balance", ["loss", pytest.param("bias", marks=pytest.mark.long)])
def test_two_ranks_with_accumulation_train_like_one_process(balance):
    ((*expected, final),) = trained(1, [[balance, *ALONE]], 10, 12)
    ((*rows, balanced),) = trained(2, [[balance, "deepspeed", 2, "fp32"]], 10, 2)
    assert_close(rows, expected)
    assert balanced == final  # counts of tokens, and no rounding between them
    assert expected[-1][0] < expected[0][0] - 0.1


@pytest.mark.long
@pytest.mark.parametrize("balance", ["loss", "bias"])
def test_every_zero_stage_and_ddp_train_a_mixture_like_one_process(balance):
    ((*expected, final),) = trained(1, [[balance, *ALONE]], STEPS, 4)
    cases = [[balance, *case] for case in (*ZERO, ["ddp", 0, "fp32"])]
    for *rows, balanced in trained(2, cases, STEPS, 2):
        assert_close(rows, expected)
        assert balanced == final


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_optimizers_of_whole_matrices_step_each_expert_whole_at_every_zero_stage(optimizer):
    ((*expected, _),) = trained(1, [["loss", *ALONE, optimizer]], 5, 4)
    for *rows, _ in trained(2, [["loss", *case, optimizer] for case in (ZERO[1], ZERO[3])], 5, 2):
        # Muon iterates in bf16: the order of an fp32 sum moves its update by up to 2**-8 of itself.
        assert_close(rows, expected, loss=1e-4, norm=1e-3)


@pytest.mark.long
def test_the_gradient_of_every_parameter_is_that_of_one_process():
    cases = [["loss", *case] for case in (ZERO[0], ZERO[2], ZERO[3])]
    ((expected,),) = run_in_ranks(f"{WORKERS}:gradients_of", 1, {"cases": [["loss", *ALONE]], "micro": 12})
    for found in run_in_ranks(f"{WORKERS}:gradients_of", 2, {"cases": cases, "micro": 2})[0]:
        assert found.keys() == expected.keys()
        for name, values in found.items():
            largest = max(map(abs, expected[name]))
            assert values == pytest.approx(expected[name], rel=1e-5, abs=1e-5 * largest), name


@pytest.mark.long
def test_starved_experts_neither_hang_nor_change_the_training():
    steps = 60
    ((expected,),) = run_in_ranks(
        f"{WORKERS}:starved_losses", 1, {"cases": [["loss", *ALONE]], "steps": steps, "micro": 12}
    )
    cases = [["loss", *case] for case in (ZERO[2], ZERO[3])]
    found, others = run_in_ranks(f"{WORKERS}:starved_losses", 2, {"cases": cases, "steps": steps, "micro": 2})
    assert found == others
    for rows in found:
        # 60 steps of AdamW carry rounding further than 20.
        assert_close(rows, expected, loss=1e-4, norm=1e-2)


@pytest.mark.parametrize("balance", [pytest.param("loss", marks=pytest.mark.long), "bias"])
def test_a_resumed_mixture_trains_on_bit_for_bit(tmp_path, balance):
    case = [balance, "deepspeed", 2, "fp32"]
    arguments = {"folder": str(tmp_path), "saved": case, "loaded": case, "micro": 6}
    (expected, found), _ = run_in_ranks(f"{WORKERS}:resumed", 2, arguments)
    assert found == expected


@pytest.mark.long
@pytest.mark.parametrize("stages", [(1, 3), (3, 0)])
@pytest.mark.parametrize("balance", ["loss", "bias"])
def test_a_mixture_resumes_at_another_zero_stage(tmp_path, balance, stages):
    saved, loaded = ([balance, "deepspeed", stage, "fp32"] for stage in stages)
    arguments = {"folder": str(tmp_path), "saved": saved, "loaded": loaded, "micro": 6}
    (expected, found), _ = run_in_ranks(f"{WORKERS}:resumed", 2, arguments)
    assert_close(found, expected)


@pytest.mark.long
def test_checkpointed_and_compiled_blocks_train_a_mixture_alike():
    options = [{}, {"checkpointing": "full"}, {"checkpointing": "selective"}, {"compile": True}]
    (plain, *others) = run_in_ranks(f"{WORKERS}:options_of", 1, {"options": options, "micro": 6})[0]
    for rows in others:
        assert_close(rows, plain)
