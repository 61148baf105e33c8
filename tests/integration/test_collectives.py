"""What passes the network in a step: our engine as one rank of many that are not there, against `pretrain plan`.

torch's `fake` process group answers every collective at once, so that any number of ranks fits a laptop.
"""

import os
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as td
from accelerate.state import AcceleratorState, GradientState
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.config.data import BatchPlan
from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.optim import OptimConfig
from pretrain.config.presets import expand_preset
from pretrain.dist import World
from pretrain.engine.build import build_engine, fill_sharded, start_accelerator
from pretrain.model import build_model
from pretrain.model.build import fill_weights, initial_weight
from pretrain.objective import build_loss
from pretrain.optim.build import build_optimizer
from pretrain.optim.groups import group_parameters
from pretrain.plan.roofline import wire_bytes
from pretrain.train.step import TrainModule
from pretrain.types import Batch
from tests.helpers.ranks import run_in_ranks
from tests.unit.plan.test_roofline import WORK

ACCUMULATION, LENGTH = 3, 32
MODEL = {"preset": "llama-5m", "vocab_size": 512, "max_seq_len": LENGTH}
RINGS = {"allreduce_": 2, "_allgather_base_": 1, "allgather_": 1, "_reduce_scatter_base_": 1, "reduce_": 1}
"""How often the data of a collective pass the link of a rank."""


class Recorder(TorchDispatchMode):
    """Sums the bytes of each collective: of the whole data, on whichever side they are."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        if function.namespace == "c10d" and "barrier" not in str(function):
            tensors = [leaf for leaf in pytree.tree_leaves((arguments, found)) if isinstance(leaf, torch.Tensor)]
            self.bytes[function._opname] += max((t.numel() * t.element_size() for t in tensors), default=0)
        return found


def traffic(world: World, ranks: int, cases: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """Trains as rank 0 of `ranks`, for each stage and dtype of gradients.

    Returns the collectives of the second step, and the elements that rank 0 saves.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "8"}
    td.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    return [_step(World(0, ranks, 0), stage, gradients) for stage, gradients in cases]


def _step(world: World, stage: int, gradients: str) -> dict[str, Any]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    config = EngineConfig(kind="deepspeed", zero_stage=stage, precision="bf16", gradients=gradients, device="cpu")
    model_config = ModelConfig.model_validate(expand_preset(MODEL))
    built = build_model(model_config, config, torch.device("cpu"), storage=stage != 3)
    size = sum(parameter.numel() for parameter in built.parameters())
    plan = BatchPlan(ACCUMULATION * world.size, ACCUMULATION, 1, ACCUMULATION)
    accelerator = start_accelerator(config, 1.0, plan, size, world)
    groups = group_parameters(built)

    def draw(name: str, shape: torch.Size) -> torch.Tensor:
        return initial_weight(name, shape, model_config, 0)

    if stage == 3:
        fill_sharded(built, draw, config, accelerator)
    else:
        fill_weights(built, draw)
    names = {id(parameter): name for name, parameter in built.named_parameters()}
    optimizer = build_optimizer(groups, OptimConfig(lr=1e-3), torch.device("cpu"))
    module = TrainModule(built, build_loss(ObjectiveConfig()))
    engine = build_engine(module, names, optimizer, accelerator, config, 1.0, world)
    tokens = torch.randint(0, 512, (1, LENGTH))
    # Compares with what the other ranks say.
    alike = "deepspeed.runtime.zero.partitioned_param_coordinator.assert_ints_same_as_other_ranks"
    with mock.patch(alike, lambda *_: None):
        for _ in range(2):
            with Recorder() as recorder:
                for number in range(ACCUMULATION):
                    engine.forward_backward(Batch(tokens, tokens), 1.0, number + 1 == ACCUMULATION)
                engine.update(1e-3)
    owned = sum(fragment.length for fragment in engine.state.owned_fragments())
    return {"bytes": dict(recorder.bytes), "parameters": size, "owned": owned}


@pytest.mark.parametrize("ranks", [8, pytest.param(1024, marks=pytest.mark.long)])
def test_a_step_sends_what_the_plan_says(ranks):
    cases = [(0, "compute"), (1, "compute"), (2, "compute"), (2, "fp32"), (3, "compute"), (3, "fp32")]
    (found,) = run_in_ranks("tests.integration.test_collectives:traffic", 1, {"ranks": ranks, "cases": cases})
    for (stage, gradients), step in zip(cases, found, strict=True):
        size = step["parameters"]
        work = replace(WORK, parameters=size, trained=size, weight_bytes=2, zero_stage=stage)
        work = replace(work, gradient_bytes=4 if gradients == "fp32" else 2)
        often, once = wire_bytes(work, ranks)
        sent = sum(RINGS[name] * count for name, count in step["bytes"].items())
        # Norms and flags are small; shares are filled up to a whole number of elements each.
        assert sent == pytest.approx(ACCUMULATION * often + once, rel=0.01, abs=2 * 64 * ranks), (stage, step)
        assert step["owned"] == pytest.approx(size / ranks, rel=0.02, abs=64), stage
