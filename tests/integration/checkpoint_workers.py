"""What the ranks of the checkpoint tests do: save engines, load them into others, and train on."""

import os
from pathlib import Path
from typing import Any

from pretrain.checkpoint.manager import CheckpointManager, load_checkpoint
from pretrain.checkpoint.state import TrainState
from pretrain.dist import World
from pretrain.engine.deepspeed_engine import set_loss_scale
from pretrain.errors import CheckpointError
from tests.integration.workers import build, train


def save_each(world: World, cases: list[list[Any]], folder: str, steps: int) -> list[list[list[float]]]:
    """Trains each case, saves it to folder/<case>, trains on; returns what followed the save."""
    followed = []
    for case in cases:
        engine = build(world, *case, micro=2)
        train(engine, world, range(steps), 2)
        manager(world, folder, case).save(engine.state, TrainState(step=steps, optimizer_step=steps))
        followed.append(train(engine, world, range(steps, steps + 3), 2))
    return followed


def manager(world: World, folder: str, case: list[Any]) -> CheckpointManager:
    """The checkpoint manager of a case."""
    return CheckpointManager(Path(folder) / "-".join(map(str, case)), 2, world, {})


def load_pairs(world: World, pairs: list[list[list[Any]]], folder: str, steps: int) -> list[list[list[float]]]:
    """For each (saved case, case to load it with): loads and trains on; returns the steps that followed."""
    followed = []
    for saved, case in pairs:
        engine = build(world, *case, micro=2)
        path = Path(folder) / "-".join(map(str, saved)) / f"step-{steps:08d}"
        state = load_checkpoint(path, engine.state)
        assert state.step == steps
        followed.append(train(engine, world, range(steps, steps + 3), 2))
    return followed


def resumed_losses(
    world: World, model: dict[str, Any], cases: list[list[Any]], folder: str, steps: int, micro: int
) -> list[dict[str, list[list[float]]]]:
    """Trains a model in each (kind, stage, precision, optimizer, checkpointing), saves, goes on; and from the save."""
    results = []
    for case in cases:
        options: dict[str, Any] = {"micro": micro, "model": model, "checkpointing": case[4]}
        engine, again = (build(world, *case[:4], **options) for _ in range(2))
        rows = train(engine, world, range(steps), micro)
        manager(world, folder, case).save(engine.state, TrainState(step=steps, optimizer_step=steps))
        followed = train(engine, world, range(steps, steps + 2), micro)
        load_checkpoint(Path(folder) / "-".join(map(str, case)) / f"step-{steps:08d}", again.state)
        resumed = train(again, world, range(steps, steps + 2), micro)
        results.append({"rows": rows, "followed": followed, "resumed": resumed})
    return results


def refused_load(world: World, saved: list[Any], case: list[Any], folder: str, steps: int) -> str:
    """What loading a saved case into another says."""
    engine = build(world, *case, micro=2)
    try:
        load_checkpoint(Path(folder) / "-".join(map(str, saved)) / f"step-{steps:08d}", engine.state)
    except CheckpointError as error:
        return str(error)
    return ""


def allow_half_on_cpu() -> None:
    """Lets DeepSpeed run fp16 here, which it refuses on CPUs without fast kernels for it: they are slow, not wrong."""
    from deepspeed.accelerator import get_accelerator

    from pretrain.engine import build as start

    start.pick_device = lambda config: "cpu"
    os.environ["DS_ACCELERATOR"] = "cpu"
    get_accelerator().is_fp16_supported = lambda: True


def half_losses(world: World, cases: list[list[Any]], folder: str, steps: int) -> list[dict[str, Any]]:
    """Trains each fp16 case from a loss scale that overflows, saves it, goes on; and goes on from what was saved."""
    allow_half_on_cpu()
    results = []
    for case in cases:
        engine: Any = build(world, *case, micro=2)
        set_loss_scale(engine._wrapped.optimizer, {"loss_scale.cur_scale": 2.0**20, "loss_scale.cur_hysteresis": 1})
        rows = train(engine, world, range(steps), 2)
        applied = steps - int(sum(row[2] for row in rows))
        scalars = engine.state.scalars()
        manager(world, folder, case).save(engine.state, TrainState(step=steps, optimizer_step=applied))
        followed = train(engine, world, range(steps, steps + 3), 2)
        again: Any = build(world, *case, micro=2)
        load_checkpoint(Path(folder) / "-".join(map(str, case)) / f"step-{steps:08d}", again.state)
        loaded = again.state.scalars()
        resumed = train(again, world, range(steps, steps + 3), 2)
        results.append({"rows": rows, "scalars": scalars, "loaded": loaded, "followed": followed, "resumed": resumed})
    return results
