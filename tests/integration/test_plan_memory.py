"""The memory of a rank that `plan` predicts, against the live tensors of real ranks under each ZeRO stage."""

import pytest

from pretrain.config.finetune import FinetuneConfig
from pretrain.config.model import parse_model
from pretrain.config.presets import expand_preset
from pretrain.plan.memory import bytes_per_parameter, state_bytes, update_bytes
from pretrain.plan.trained import Values, count_values, plan_trained
from tests.helpers.ranks import run_in_ranks
from tests.integration.plan_workers import decoder_of

DEPTHS = [2, 14]
"""Far enough apart: a parameter that two ranks share, which each holds whole for a while, is half a per cent."""
STAGES = [["deepspeed", stage, precision] for precision in ("fp32", "bf16") for stage in range(4)]


def check_state(world_size, cases):
    """Compares bytes a parameter: the difference of two depths, in which buckets and all that is fixed cancel."""
    arguments = {"cases": cases, "depths": DEPTHS}
    for rows in run_in_ranks("tests.integration.plan_workers:bytes_by_depth", world_size, arguments, timeout=None):
        for (kind, stage, precision, *rest), ((few, shallow), (many, deep)) in zip(cases, rows, strict=True):
            state = state_bytes(rest[0] if rest else "adamw", Values(weights=1, trained=1, hidden=1, saved=1))
            planned = bytes_per_parameter(stage, precision, world_size, state).total
            assert (deep - shallow) / (many - few) == pytest.approx(planned, rel=0.02), (kind, stage, precision)


@pytest.mark.long
def test_two_ranks_hold_what_is_planned():
    check_state(2, [["deepspeed", 2, "bf16"]])


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_stage_holds_what_is_planned(world_size):
    check_state(world_size, [*STAGES, ["single" if world_size == 1 else "ddp", 0, "fp32"]])


@pytest.mark.long
def test_an_update_at_stage_3_makes_the_gradients_that_are_planned():
    cases = [["deepspeed", 3, "fp32"], ["deepspeed", 3, "bf16"]]
    arguments = {"cases": cases, "depths": DEPTHS}
    for rows in run_in_ranks("tests.integration.plan_workers:bytes_in_update", 2, arguments, timeout=None):
        for (_, stage, precision), ((few, shallow), (many, deep)) in zip(cases, rows, strict=True):
            made = update_bytes(3, many, 4, 2) - update_bytes(3, few, 4, 2)  # after they were converted
            planned = bytes_per_parameter(stage, precision, 2).total + made / (many - few)
            assert (deep - shallow) / (many - few) == pytest.approx(planned, rel=0.02), precision


def test_gradients_of_16_bits_are_there_twice_while_an_update_converts_them():
    for stage in (1, 2, 3):
        assert update_bytes(stage, 10**6, 2, 4) == 6 * 250_000 and update_bytes(stage, 10**6, 4, 4) == 4 * 250_000
    assert update_bytes(3, 10**11, 4, 10) == 4 * 10**9  # a group of DeepSpeed's at a time
    assert update_bytes(1, 10**11, 4, 10) == 4 * 10**10


@pytest.mark.long
def test_an_update_at_stages_1_and_2_steps_the_gradients_of_a_share_in_fp32():
    cases = [["deepspeed", stage, precision] for stage in (1, 2) for precision in ("fp32", "bf16")]
    arguments = {"cases": cases, "depths": DEPTHS}
    for rows in run_in_ranks("tests.integration.plan_workers:bytes_in_update", 2, arguments, timeout=None):
        for (_, stage, precision), ((few, shallow), (many, deep)) in zip(cases, rows, strict=True):
            made = update_bytes(stage, many, 4, 2) - update_bytes(stage, few, 4, 2)  # after they were converted
            # Of kept ones those of the share, also at stage 1.
            planned = bytes_per_parameter(2, precision, 2).total + made / (many - few)
            assert (deep - shallow) / (many - few) == pytest.approx(planned, rel=0.02), (stage, precision)


@pytest.mark.long
def test_adafactor_holds_what_is_planned():
    check_state(2, [["deepspeed", 1, "bf16", "adafactor"]])


ADAPTERS = FinetuneConfig(kind="lora", rank=4)
FROZEN = ["embedding.*", "decoder.blocks.0.*"]


def values_of(finetune: str, depth: int) -> Values:
    """What is planned of a model that `workers.build` freezes or adapts."""
    model = parse_model(expand_preset(decoder_of(depth)))
    how = {"full": ([], FinetuneConfig()), "freeze": (FROZEN, FinetuneConfig()), "lora": ([], ADAPTERS)}[finetune]
    return count_values(model, plan_trained(model, *how))


def planned_bytes(case: list, world_size: int, values: Values) -> float:
    """Weights, gradients and optimizer state of a rank."""
    each = bytes_per_parameter(case[1], case[2], world_size)
    return each.weights * values.weights + (each.gradients + each.optimizer) * values.trained


def held_and_planned(world_size, cases, arms, folder=None):
    """Returns the case, the bytes that the arms hold, and those that are planned, of each case on each rank."""
    arguments, rows = {"cases": cases, "arms": arms, "folder": folder}, []
    for found in run_in_ranks("tests.integration.plan_workers:bytes_tuned", world_size, arguments, timeout=None):
        for case, of_arms in zip(cases, found, strict=True):
            values = [values_of(*arm) for arm in arms]
            assert [numbers for numbers, _ in of_arms] == [one.weights for one in values], case
            planned = [planned_bytes(case, world_size, one) for one in values]
            rows.append((case, [held for _, held in of_arms], planned))
    return rows


@pytest.mark.long
def test_what_is_frozen_has_neither_gradient_nor_moments_and_a_checkpoint_is_as_large_as_planned(tmp_path):
    arms = [["lora", DEPTHS[0]], ["lora", DEPTHS[1]], ["full", DEPTHS[0]], ["freeze", DEPTHS[0]]]
    ((_, held, planned),) = held_and_planned(1, [["single", 0, "fp32"]], arms, str(tmp_path))
    # What is fixed, and buckets, cancel.
    assert held[1] - held[0] == pytest.approx(planned[1] - planned[0], rel=0.02)
    assert held[2] - held[3] == pytest.approx(planned[2] - planned[3], rel=0.02)
    for finetune in ("freeze", "lora"):
        values = values_of(finetune, DEPTHS[0])
        (path,) = (tmp_path / f"{finetune}-{DEPTHS[0]}").iterdir()
        files = list(path.glob("*.safetensors"))
        headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)
        tensors = sum(file.stat().st_size for file in files) - headers
        assert tensors == 4 * values.saved + state_bytes("adamw", values), finetune


@pytest.mark.long
@pytest.mark.parametrize("finetune", ["lora", "freeze"])
def test_adapters_and_frozen_weights_hold_what_is_planned_at_every_stage(finetune):
    # By depth: the base of adapters is frozen, and grows; a parameter that two ranks share would weigh in a difference
    # between kinds of fine-tuning.
    arms = [[finetune, depth] for depth in DEPTHS]
    for case, held, planned in held_and_planned(2, [*STAGES, ["ddp", 0, "fp32"]], arms):
        assert held[1] - held[0] == pytest.approx(planned[1] - planned[0], rel=0.02), case
