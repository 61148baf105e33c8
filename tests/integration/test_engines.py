"""Every engine, ZeRO stage and precision computes the same training, on real gloo ranks."""

import math

import numpy as np
import pytest

from pretrain.config.engine import EngineConfig
from pretrain.engine.build import pick_device
from pretrain.errors import ConfigError
from tests.helpers.ranks import run_in_ranks
from tests.integration import references
from tests.integration.workers import BY_BATCHES

STAGES_FP32 = [["deepspeed", stage, "fp32"] for stage in range(4)]
STAGES_BF16 = [["deepspeed", stage, "bf16"] for stage in range(4)]
OFFLOADED = [
    *(["deepspeed", stage, "fp32", "adamw", "optimizer"] for stage in (1, 2, 3)),
    ["deepspeed", 3, "fp32", "adamw", "params"],
    ["deepspeed", 3, "fp32", "adamw", "both"],
    ["deepspeed", 2, "bf16", "adamw", "optimizer"],
]
STEPS = 20


@pytest.fixture(scope="module")
def reference() -> list[list[float]]:
    """[loss, grad norm] of each step: one process, one big batch, float64, torch alone."""
    return references.bare_float64(STEPS)


def test_one_process_without_an_engine_trains_like_the_reference(reference):
    cases = [["single", 0, "fp32"]]
    (((rows,),),) = [
        run_in_ranks("tests.integration.engine_workers:losses_of", 1, {"cases": cases, "steps": STEPS, "micro": 4})
    ]
    for row, expected in zip(rows, reference, strict=True):
        assert row[:2] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("steps", [6, pytest.param(STEPS, marks=pytest.mark.long)])
def test_every_zero_stage_and_ddp_on_two_ranks_trains_like_one_process(reference, steps):
    cases = [*STAGES_FP32, ["ddp", 0, "fp32"]]
    # micro 2 of 6 rows a rank: three accumulation steps, with targets spread unevenly over ranks and micro-batches.
    ranks = run_in_ranks("tests.integration.engine_workers:losses_of", 2, {"cases": cases, "steps": steps, "micro": 2})
    assert ranks[0] == ranks[1], "all ranks must see the same global loss and gradient norm"
    for case, rows in zip(cases, ranks[0], strict=True):
        for step, (row, expected) in enumerate(zip(rows, reference[:steps], strict=True)):
            assert row[0] == pytest.approx(expected[0], rel=1e-4), (case, step)
            assert row[1] == pytest.approx(expected[1], rel=1e-3), (case, step)
    assert reference[-1][0] < reference[0][0] - 0.1


OPTIMIZERS = ["muon", "adafactor", "lion", "soap", "normuon", "cautious", "completep"]


def test_our_own_engine_in_16_bits_trains_bit_for_bit_as_zero_1():
    # Micro-batches of 4 of 12 rows: gradients are summed in bf16 under both.
    cases = [["single", 0, "bf16"], STAGES_BF16[1]]
    arguments = {"cases": cases, "steps": 5, "micro": 4}
    ((own, zero),) = run_in_ranks("tests.integration.engine_workers:losses_of", 1, arguments)
    assert own == zero
    assert own[-1][0] < own[0][0] - 0.5


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "grad_clip"), [(1, 1.0), (2, 1e9)])
def test_our_own_engine_in_16_bits_has_the_losses_of_zero_1_with_every_optimizer(world_size, grad_clip):
    kind = "single" if world_size == 1 else "ddp"
    cases = [[*case, optimizer] for optimizer in ("adamw", *OPTIMIZERS) for case in ([kind, 0, "bf16"], STAGES_BF16[1])]
    # ZeRO adds the norm up part by part: its last bit differs on two ranks, and through clipping so would the weights.
    arguments = {"cases": cases, "steps": 5, "micro": 2, "grad_clip": grad_clip}
    ranks = run_in_ranks("tests.integration.engine_workers:losses_of", world_size, arguments)
    assert all(rows == ranks[0] for rows in ranks)
    for case, own, zero in zip(cases[::2], ranks[0][::2], ranks[0][1::2], strict=True):
        assert [row[0] for row in own] == [row[0] for row in zero], case
        assert [row[1] for row in own] == pytest.approx([row[1] for row in zero], rel=1e-6), case


def test_no_step_of_deepspeed_waits_for_the_device():
    arguments = {"cases": STAGES_BF16, "micro": 4}
    assert run_in_ranks("tests.integration.engine_workers:device_waits", 1, arguments) == [[0, 0, 0, 0]]


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["muon", "muon by batches", "adafactor"])
def test_optimizers_of_whole_matrices_train_as_torch_does_on_each_matrix_at_every_zero_stage(optimizer):
    expected = references.bare_blocks(optimizer.removesuffix(BY_BATCHES), 5)
    cases = [[*case, optimizer] for case in (*STAGES_FP32, ["ddp", 0, "fp32"])]
    for world_size, micro, chosen in ((2, 2, cases), (3, 4, cases[2:4])):
        arguments = {"cases": chosen, "steps": 5, "micro": micro}
        ranks = run_in_ranks("tests.integration.engine_workers:losses_of", world_size, arguments)
        assert all(rows == ranks[0] for rows in ranks)
        for case, rows in zip(chosen, ranks[0], strict=True):
            for step, (row, wanted) in enumerate(zip(rows, expected, strict=True)):
                # Muon iterates in bf16: the order of an fp32 sum moves its update by up to 2**-8 of itself.
                tolerance = (1e-4, 1e-3) if optimizer.startswith("muon") else (1e-5, 1e-4)
                assert row[0] == pytest.approx(wanted[0], rel=tolerance[0]), (case, step)
                assert row[1] == pytest.approx(wanted[1], rel=tolerance[1]), (case, step)
    assert expected[-1][0] < expected[0][0] - 0.05


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["normuon", "normuon by batches", "cautious", "completep", "lion", "soap"])
def test_recipes_of_an_optimizer_train_alike_in_one_process_and_at_every_zero_stage(recipe):
    # Each rule is compared with its paper in tests/unit/optim; here, with itself in one process.
    arguments = {"cases": [["single", 0, "fp32", recipe]], "steps": 5, "micro": 4}
    ((alone,),) = run_in_ranks("tests.integration.engine_workers:losses_of", 1, arguments)
    cases = [[*case, recipe] for case in (*STAGES_FP32, ["ddp", 0, "fp32"])]
    ranks = run_in_ranks("tests.integration.engine_workers:losses_of", 2, {"cases": cases, "steps": 5, "micro": 2})
    assert ranks[0] == ranks[1]
    for case, rows in zip(cases, ranks[0], strict=True):
        for step, (row, wanted) in enumerate(zip(rows, alone, strict=True)):
            # As above for Muon; the sign of a gradient near 0 turns whole updates of Lion. SOAP's first factors lack
            # full rank, and rounding picks the basis of their null space: other directions for AdamW.
            tolerance = (1e-2, 1e-1) if recipe == "soap" else (1e-3, 1e-2)
            assert row[0] == pytest.approx(wanted[0], rel=tolerance[0]), (case, step)
            assert row[1] == pytest.approx(wanted[1], rel=tolerance[1]), (case, step)
    assert alone[-1][0] < alone[0][0]


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_optimizers_of_whole_matrices_follow_fp32_in_bf16(optimizer):
    expected = references.bare_blocks(optimizer, 5)
    cases = [[*case, optimizer] for case in (STAGES_BF16[0], STAGES_BF16[3])]
    (results, _) = run_in_ranks(
        "tests.integration.engine_workers:losses_of", 2, {"cases": cases, "steps": 5, "micro": 6}
    )
    for case, rows in zip(cases, results, strict=True):
        for row, wanted in zip(rows, expected, strict=True):
            assert row[0] == pytest.approx(wanted[0], rel=1e-2), case


@pytest.mark.long
def test_a_copy_of_the_weights_on_each_node_changes_no_bit_and_a_resumed_run_neither(tmp_path):
    def trained(zero_hpz, loads=False):
        arguments = {"zero_hpz": zero_hpz, "folder": str(tmp_path / str(zero_hpz)), "loads": loads}
        return run_in_ranks("tests.integration.engine_workers:node_copies", 4, arguments)

    plain, copied, resumed = trained(1), trained(2), trained(2, loads=True)
    assert [rank["rows"] for rank in copied] == [rank["rows"] for rank in plain]
    assert [rank["rows"] for rank in resumed] == [rank["rows"][3:] for rank in plain]
    assert {rank["copied"] for rank in plain} == {0}
    # Half of the weights of the last gathers, on each of two ranks: small ones stay whole.
    assert all(rank["copied"] > 10_000 for rank in (*copied, *resumed))


@pytest.mark.long
def test_the_gradient_is_clipped_to_the_global_norm_and_left_alone_without_a_limit():
    cases, clips = [*STAGES_FP32, ["ddp", 0, "fp32"]], [0.0, 0.1]
    for rows in run_in_ranks("tests.integration.engine_workers:first_moments", 2, {"cases": cases, "clips": clips}):
        for number, (norm, moment) in enumerate(rows):
            case, clip = cases[number // 2], clips[number % 2]
            limit = min(norm, clip) if clip else norm
            assert norm > 1.0, "the limit must bind"
            # After one step AdamW's first moment is (1 - beta1) times the gradient that it was given. DeepSpeed adds
            # 1e-6 to the norm that it divides by.
            assert moment == pytest.approx(0.1 * limit, rel=1e-4), (case, clip)


@pytest.mark.long
def test_what_is_kept_in_host_memory_is_what_was_asked_for_and_trains_alike(reference):
    (facts,) = run_in_ranks("tests.integration.engine_workers:offload_facts", 1, {"cases": OFFLOADED})
    for (_, stage, _, _, offload), (optimizer, params, description, kind) in zip(OFFLOADED, facts, strict=True):
        assert optimizer == ("cpu" if offload in ("optimizer", "both") else "none")
        assert params == ("cpu" if offload in ("params", "both") else "none")
        assert f"ZeRO-{stage}" in description
        assert description.endswith("in host memory")
        # Not DeepSpeed's own, which is compiled at the first start.
        assert kind == "AdamW"
    (results, _) = run_in_ranks(
        "tests.integration.engine_workers:losses_of", 2, {"cases": OFFLOADED, "steps": 5, "micro": 2}
    )
    for case, rows in zip(OFFLOADED, results, strict=True):
        # The second is that of bf16, as above.
        for row, expected in zip(rows, reference, strict=False):
            assert row[0] == pytest.approx(expected[0], rel=1e-4 if case[2] == "fp32" else 2e-2), case
            assert row[1] == pytest.approx(expected[1], rel=1e-3 if case[2] == "fp32" else 5e-2), case


@pytest.mark.long
def test_activations_on_the_host_change_no_bit_of_a_run_at_every_zero_stage():
    engines = [(0, "bf16", "none"), (1, "fp32", "selective"), (2, "fp32", "full"), (3, "bf16", "none")]
    cases = [["deepspeed", *engine, False] for engine in (*engines, (3, "fp32", "full"))]
    cases.append(["ddp", 0, "bf16", "none", False])
    (results, _) = run_in_ranks(
        "tests.integration.engine_workers:offloaded_losses", 2, {"cases": cases, "steps": 3, "micro": 3}
    )
    for case, (offloaded, plain) in zip(cases, results, strict=True):
        assert offloaded == plain, case


@pytest.mark.long
def test_compiled_blocks_with_activations_on_the_host_train_bit_for_bit_at_zero_3():
    cases = [["deepspeed", 3, "fp32", mode, True] for mode in ("none", "full")]
    (results, _) = run_in_ranks(
        "tests.integration.engine_workers:offloaded_losses", 2, {"cases": cases, "steps": 2, "micro": 3}
    )
    for case, (offloaded, plain) in zip(cases, results, strict=True):
        assert offloaded == plain, case


@pytest.mark.long
def test_an_encoder_decoder_trains_alike_at_every_zero_stage_and_on_one_process():
    stages = [*STAGES_FP32, ["ddp", 0, "fp32"]]
    alone = run_in_ranks(
        "tests.integration.engine_workers:two_stacks_losses",
        1,
        {"cases": [["single", 0, "fp32"]], "steps": 6, "micro": 12},
    )[0][0]
    for rows in run_in_ranks(
        "tests.integration.engine_workers:two_stacks_losses", 2, {"cases": stages, "steps": 6, "micro": 2}
    )[0]:
        for row, expected in zip(rows, alone, strict=True):
            # fp32 sums in another order, fed back through six steps of Adam.
            assert row[:2] == pytest.approx(expected[:2], rel=1e-3)
    assert alone[-1][0] < alone[0][0]


@pytest.mark.long
def test_parameters_cut_up_one_by_one_train_bit_for_bit_like_whole_ones():
    results = run_in_ranks(
        "tests.integration.engine_workers:sharded_losses", 2, {"precisions": ["fp32", "bf16"], "steps": 4, "micro": 3}
    )
    for sharded, whole in results[0]:
        assert sharded == whole


def test_a_rank_never_holds_more_than_its_share_and_one_parameter():
    for total, largest, peak in run_in_ranks("tests.integration.engine_workers:sharded_peak", 2, {}):
        assert peak <= total / 2 * 1.02 + largest


@pytest.mark.long
def test_compiled_blocks_train_alike_at_every_zero_stage_with_no_hook_inside_a_graph(reference):
    results = run_in_ranks(
        "tests.integration.engine_workers:compiled_losses",
        2,
        {"cases": [(0, "none"), (2, "selective"), (3, "none"), (3, "full"), (3, "selective")], "steps": 3, "micro": 2},
    )
    for cases, graph_breaks in results:
        assert graph_breaks == 0
        for rows in cases:
            for row, expected in zip(rows, reference, strict=False):
                assert row[:2] == pytest.approx(expected, rel=1e-3)


@pytest.mark.long
def test_bf16_stages_agree_with_each_other_and_follow_fp32(reference):
    (results, _) = run_in_ranks(
        "tests.integration.engine_workers:losses_of", 2, {"cases": STAGES_BF16, "steps": STEPS, "micro": 6}
    )
    losses, exact = (np.array(rows)[..., 0] for rows in (results, reference))
    # bf16 has 8 bits of mantissa: 2**-8 a rounding, which feedback doubles every few steps; equally exact orders of
    # summation are up to 5% apart after 20, and then by chance.
    apart = np.abs(losses - exact) / exact
    assert apart[:, :10].max() < 1e-2, apart
    assert apart.mean(axis=1).max() < 1e-2, apart
    assert (np.abs(losses - losses[0]) / losses[0]).max() < 1e-2, losses


@pytest.mark.long
def test_a_non_finite_gradient_on_one_rank_changes_nothing_on_any():
    cases = [*STAGES_FP32, *STAGES_BF16, ["ddp", 0, "fp32"], ["ddp", 0, "bf16"], OFFLOADED[1], OFFLOADED[4]]
    cases += [["ddp", 0, "bf16", "muon"], ["deepspeed", 3, "bf16", "muon"], ["deepspeed", 2, "fp32", "adafactor"]]
    for results in run_in_ranks("tests.integration.engine_workers:poisoned", 2, {"cases": cases}):
        for case, (rows, unchanged) in zip(cases, results, strict=True):
            assert [row[2] for row in rows] == [0.0, 0.0, 1.0, 0.0], case
            assert not math.isfinite(rows[2][1]), case
            assert unchanged, case
            assert math.isfinite(rows[3][0]), case


@pytest.mark.long
def test_fp16_scales_its_loss_skips_what_overflows_and_goes_on_from_a_checkpoint_as_if_nothing_had_been(tmp_path):
    """Run on a CPU, where DeepSpeed has to be told to: the kernels are slow there, the scaling is the same."""
    cases = [*(["deepspeed", stage, "fp16"] for stage in (1, 2, 3)), ["deepspeed", 2, "fp16", "muon"]]
    arguments = {"cases": cases, "folder": str(tmp_path), "steps": 5}
    for results in run_in_ranks("tests.integration.checkpoint_workers:half_losses", 2, arguments):
        for case, result in zip(cases, results, strict=True):
            # From 2**20 the scale halves twice before the gradients of this model fit under 65504.
            assert [row[2] for row in result["rows"]] == [1.0, 1.0, 0.0, 0.0, 0.0], case
            assert result["scalars"]["loss_scale.cur_scale"] == 2.0**18, case
            assert result["scalars"]["loss_scale.last_overflow_iter"] == 1, case
            assert result["loaded"] == result["scalars"], case
            assert result["resumed"] == result["followed"], case
            assert result["followed"][-1][0] < result["rows"][0][0] - 0.2, case
            norms = [row[1] for row in (*result["rows"], *result["followed"]) if not row[2]]
            assert max(norms) < 10, "gradient norms are those without a scale"


def test_fp16_without_a_gpu_is_refused_before_anything_is_started():
    with pytest.raises(ConfigError, match=r"engine.precision=fp16 needs a GPU, and torch sees none; use .*bf16, or"):
        pick_device(EngineConfig(precision="fp16"))
