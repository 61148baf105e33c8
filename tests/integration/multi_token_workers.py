"""What the ranks of the tests of `multi_token` do: train, save and load models that predict further tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from pretrain.checkpoint.load import load_checkpoint
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.state import TrainState
from pretrain.dist import World
from tests.integration.expert_parallel_workers import DIVISIBLE
from tests.integration.experts_workers import EXPERTS, mixture
from tests.integration.workers import MODEL, build, train, whole_moments


def model_of(name: str) -> dict[str, Any]:
    """A dense model with one module, or a mixture with two, each of which has experts too."""
    if name == "dense":
        return MODEL | {"multi_token": 1}
    with mock.patch.dict(EXPERTS, DIVISIBLE):
        return mixture("bias") | {"multi_token": 2}


def losses_of(
    world: World, model: str, cases: list[list[Any]], steps: int, micro: int, experts: int = 1, **options: Any
) -> list[list[list[float]]]:
    """Trains each (kind, stage, precision, ...)."""
    world = replace(world, experts=experts)
    return [
        train(
            build(world, *case, micro=micro, model=model_of(model), sharded=case[1] == 3, **options),
            world,
            range(steps),
            micro,
        )
        for case in cases
    ]


def gradients_of(world: World, model: str, cases: list[list[Any]], micro: int) -> list[dict[str, list[float]]]:
    """First moment of every parameter after one step without clipping: a tenth of its gradient."""
    found = []
    for case in cases:
        engine = build(world, *case, micro=micro, model=model_of(model), grad_clip=0.0)
        train(engine, world, range(1), micro)
        found.append(whole_moments(engine))
    return found


def resumed(world: World, folder: str, model: str, saved: list[Any], loaded: list[Any], micro: int) -> list[Any]:
    """Rows of the steps that follow a save, of the engine that saved, and of another that loaded."""
    engine = build(world, *saved, micro=micro, model=model_of(model))
    train(engine, world, range(3), micro)
    CheckpointManager(Path(folder), 2, world, {}).save(engine.state, TrainState(step=3, optimizer_step=3))
    expected = train(engine, world, range(3, 6), micro)
    other = build(world, *loaded, micro=micro, model=model_of(model))
    load_checkpoint(Path(folder) / "step-00000003", other.state)
    return [expected, train(other, world, range(3, 6), micro)]
