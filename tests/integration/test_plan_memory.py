"""The memory of a rank that `plan` predicts, against the live tensors of real ranks under each ZeRO stage."""

import pytest

from pretrain.plan.memory import bytes_per_parameter
from tests.helpers.ranks import run_in_ranks

DEPTHS = [2, 14]
"""Far enough apart: a parameter that two ranks share, which each holds whole for a while, is half a per cent."""
STAGES = [["deepspeed", stage, precision] for precision in ("fp32", "bf16") for stage in range(4)]


def check_state(world_size, cases):
    """Compares bytes a parameter: the difference of two depths, in which buckets and all that is fixed cancel."""
    arguments = {"cases": cases, "depths": DEPTHS}
    for rows in run_in_ranks("tests.integration.plan_workers:bytes_by_depth", world_size, arguments, timeout_s=900):
        for (kind, stage, precision, *rest), ((few, shallow), (many, deep)) in zip(cases, rows, strict=True):
            planned = bytes_per_parameter(stage, precision, world_size, rest[0] if rest else "adamw").total
            assert (deep - shallow) / (many - few) == pytest.approx(planned, rel=0.02), (kind, stage, precision)


@pytest.mark.long
def test_two_ranks_hold_what_is_planned():
    check_state(2, [["deepspeed", 2, "bf16"]])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_stage_holds_what_is_planned(world_size):
    check_state(world_size, [*STAGES, ["single" if world_size == 1 else "ddp", 0, "fp32"]])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_adafactor_holds_what_is_planned():
    check_state(2, [["deepspeed", 1, "bf16", "adafactor"]])
