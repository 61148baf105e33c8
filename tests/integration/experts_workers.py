"""What the ranks of the tests of experts do: train mixtures under every engine, starve experts, save and resume."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.checkpoint.load import load_checkpoint
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.state import TrainState
from pretrain.dist import World
from pretrain.engine.engine import Engine
from pretrain.model.parts.experts import Router
from tests.integration.workers import MODEL, build, train, whole_moments

EXPERTS: dict[str, dict[str, Any]] = {
    "loss": {"count": 5, "top_k": 2, "width": 10, "balance_weight": 0.5, "z_loss": 0.01},
    "bias": {
        "count": 6,
        "top_k": 3,
        "width": 6,
        "shared": 1,
        "scores": "sigmoid",
        "scale": 2.5,
        "balance": "bias",
        "balance_rate": 0.02,
    },
}
"""Odd numbers of experts and widths, so that partitions cut experts; balance strong enough to show."""


def mixture(name: str) -> dict[str, Any]:
    """Section `model:` of a mixture by the name of its balance; `encoder`: of an encoder."""
    stack = MODEL["decoder"] | {"experts": EXPERTS[name]}
    return MODEL | ({"decoder": None, "encoder": stack | {"layers": 2}} if name == "encoder" else {"decoder": stack})


def losses_of(world: World, cases: list[list[Any]], steps: int, micro: int) -> list[list[list[float]]]:
    """Trains each (balance, kind, stage, precision, optimizer); returns rows, and the balance at the end."""
    found = []
    for balance, *case in cases:
        engine = build(world, *case, micro=micro, model=mixture(balance), sharded=case[1] == 3)
        rows = train(engine, world, range(steps), micro)
        found.append([*rows, balance_of(engine)])
    return found


def balance_of(engine: Any) -> list[float]:
    """Every value that follows the loads."""
    return torch.cat([kept.tensor for kept in engine.module.balance.state]).tolist()


def options_of(world: World, options: list[dict[str, Any]], micro: int) -> list[list[list[float]]]:
    """Trains 5 steps in each way of `build`, at ZeRO 2."""
    return [
        train(build(world, "deepspeed", 2, "fp32", micro=micro, model=mixture("loss"), **each), world, range(5), micro)
        for each in options
    ]


def starved_losses(world: World, cases: list[list[Any]], steps: int, micro: int) -> list[list[list[float]]]:
    """Trains while each step chooses experts against the balance: all tokens to one, or by rank and micro-batch.

    A token that is chosen for keeps its scores as weights, so that every step has its definition in one process.
    """
    whole = Router.forward

    def forced(router: Router, x_PD: Tensor, counted_P: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        step = engine.module.step_of_test
        count, top_k = router.config.count, router.config.top_k
        # By the content of each row: the same for any rank and micro-batch, and none of most experts.
        first_P = (x_PD.detach()[:, 0] > 0).long() if step % 3 else torch.zeros(len(x_PD), dtype=torch.int64)
        experts_PJ = (first_P[:, None] + step + torch.arange(top_k)) % count
        scores_PE = torch.nn.functional.linear(x_PD, router.weight).softmax(dim=-1)
        weights_PJ = scores_PE.gather(1, experts_PJ)
        counts_E = torch.bincount(experts_PJ.flatten(), minlength=count).float()
        sums = torch.cat((counts_E, scores_PE.sum(dim=0), torch.zeros(2)))
        return experts_PJ, weights_PJ, None if counted_P is None else sums

    found = []
    Router.forward = forced
    try:
        for balance, *case in cases:
            engine: Any = build(world, *case, micro=micro, model=mixture(balance))
            rows = []
            for step in range(steps):
                engine.module.step_of_test = step
                rows += train(engine, world, range(step, step + 1), micro)
            found.append(rows)
    finally:
        Router.forward = whole
    return found


def resumed(world: World, folder: str, saved: list[Any], loaded: list[Any], micro: int) -> list[list[list[float]]]:
    """Rows of the steps that follow a save, of the engine that saved, and of another that loaded."""
    balance, *case = saved
    engine = build(world, *case, micro=micro, model=mixture(balance))
    train(engine, world, range(3), micro)
    manager = CheckpointManager(Path(folder), 2, world, {})
    manager.save(engine.state, TrainState(step=3, optimizer_step=3))
    expected = train(engine, world, range(3, 6), micro)
    other: Engine = build(world, *loaded[1:], micro=micro, model=mixture(balance))
    load_checkpoint(Path(folder) / "step-00000003", other.state)
    return [expected, train(other, world, range(3, 6), micro)]


def gradients_of(world: World, cases: list[list[Any]], micro: int) -> list[dict[str, list[float]]]:
    """First moment of every parameter after one step without clipping: a tenth of its gradient."""
    found = []
    for balance, *case in cases:
        engine = build(world, *case, micro=micro, model=mixture(balance), grad_clip=0.0)
        train(engine, world, range(1), micro)
        found.append(whole_moments(engine))
    return found
