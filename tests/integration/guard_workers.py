"""What the ranks of the guard tests do: steps that are dropped, rehearsed, or go wrong on one rank."""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import TestCase

import torch
from torch import Tensor, nn

from pretrain.dist import World
from pretrain.engine.engine import Engine
from pretrain.errors import DivergedError
from pretrain.training.bad_step import find_fault
from pretrain.training.guard import check_replicas
from pretrain.types import IGNORE_INDEX, Batch
from tests.integration.checkpoint_workers import allow_half_on_cpu
from tests.integration.engine_workers import snapshot
from tests.integration.workers import ROWS, build, global_batch, rows_of, train

MICRO = 2


def micro_batches(world: World, step: int) -> list[Batch]:
    """This rank's micro-batches of a step of `workers.train`."""
    whole, share = global_batch(step), ROWS // world.size
    return [
        rows_of(whole, slice(first, first + MICRO))
        for first in range(world.rank * share, (world.rank + 1) * share, MICRO)
    ]


def accumulate(engine: Engine, world: World, step: int, *, is_empty: bool = False) -> None:
    """Forward and backward of a step, without its update; `is_empty`: without its targets."""
    micros = micro_batches(world, step)
    for micro in micros:
        if is_empty:
            micro.targets_BT.fill_(IGNORE_INDEX)
        engine.forward_backward(micro, world.size / global_batch(step).num_targets(), micro is micros[-1])


def dropped(world: World, cases: list[list[Any]]) -> list[list[Any]]:
    """Trains 4 steps, with one dropped, an empty one dropped and one rehearsed before the third; returns those rows,
    those of an engine to which that did not happen, what a drop said, whether all stayed, and the loss scale before and
    after."""
    results = []
    if any(case[2] == "fp16" for case in cases):
        allow_half_on_cpu()
    for case in cases:
        engine = build(world, *case, micro=MICRO)
        rows = train(engine, world, range(2), MICRO)
        before, scale = snapshot(engine), engine.state.scalars()
        accumulate(engine, world, 7)
        with TestCase().assertNoLogs("DeepSpeed", "WARNING"):  # which would speak of gradients that are not finite
            update = engine.update(1e-2, drop=True)
            accumulate(engine, world, 7, is_empty=True)
            engine.update(1e-2, drop=True)
        engine.rehearse(micro_batches(world, 8)[0])
        unchanged = all((a == b).all() for a, b in zip(before, snapshot(engine), strict=True))
        scales = [scale, engine.state.scalars()]
        rows += train(engine, world, range(2, 4), MICRO)
        plain = train(build(world, *case, micro=MICRO), world, range(4), MICRO)
        results.append([rows, plain, update.skipped, bool(unchanged), scales])
    return results


def faults(world: World, cases: list[list[Any]], kinds: list[str]) -> list[list[Any]]:
    """Of each case and kind of damage, done to rank 1 alone: what was found, and whether it left weights and moments
    alone. Kinds: a bad `output` or `gradient` of a module, a bad `weight`, or `none`."""
    results = []
    for case in cases:
        engine = build(world, *case, micro=MICRO)
        train(engine, world, range(1), MICRO)
        for kind in kinds:
            with torch.no_grad():
                undo = _damage(engine, kind) if world.rank == 1 else lambda: None
            before = snapshot(engine)
            fault = find_fault(engine, micro_batches(world, 1), lambda number: None, 1.0)
            unchanged = all(torch.equal(a, b) for a, b in zip(before, snapshot(engine), strict=True))
            undo()
            results.append([asdict(fault), unchanged])
        accumulate(engine, world, 1)
        assert not engine.update(1e-2).skipped, "after all of it, training goes on"
    return results


def _damage(engine: Engine, kind: str) -> Callable[[], None]:
    """Does damage; returns what undoes it."""
    block: Any = engine.module.model.decoder.blocks[1]  # type: ignore[union-attr,index]
    if kind == "output":
        return block.feedforward.register_forward_hook(lambda module, inputs, output: output * float("nan")).remove
    if kind == "gradient":

        def spoil(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: gradient * float("inf"))

        return block.feedforward.register_forward_hook(spoil).remove
    if kind == "none":
        return lambda: None
    return _set_weight(engine, "decoder.blocks.0.attention_norm.weight", float("nan"))


def _set_weight(engine: Engine, name: str, value: float) -> Callable[[], None]:
    weight = dict(engine.working_weights())[name].view(-1)
    kept = weight[0].clone()
    weight[0] = value

    def undo() -> None:
        with torch.no_grad():
            weight[0] = kept

    return undo


def at_the_least_scale(world: World) -> list[Any]:
    """Steps of fp16 that overflow while the loss scale is at its minimum: whether each was skipped, and the scale."""
    allow_half_on_cpu()
    engine: Any = build(world, "deepspeed", 2, "fp16", micro=MICRO)
    scaler = engine._wrapped.optimizer.loss_scaler
    scaler.cur_scale, scaler.cur_hysteresis = 1.0, 1
    skipped = []
    for _ in range(3):
        for micro in micro_batches(world, 0):
            engine.forward_backward(micro, float("inf"), True)
            skipped.append(engine.update(1e-2).skipped)
    return [skipped, engine.state.scalars()["loss_scale.cur_scale"]]


def dropped_and_faults(world: World, cases: list[list[Any]], kinds: list[str]) -> list[list[list[Any]]]:
    """Both of the above, in one start of the ranks."""
    return [dropped(world, cases), faults(world, cases, kinds)]


def replicas(world: World, cases: list[list[Any]], flipped: list[int]) -> list[list[str | None]]:
    """Of each case: what the comparison says before, and after one weight of each rank in `flipped` was changed."""
    results = []
    for case in cases:
        engine = build(world, *case, micro=12 // world.size)
        train(engine, world, range(2), 12 // world.size)
        said = [compared(engine)]
        with torch.no_grad():
            if world.rank in flipped:
                _set_weight(engine, "decoder.blocks.1.feedforward_norm.weight", 1.25)
        results.append([*said, compared(engine)])
    return results


def compared(engine: Engine) -> str | None:
    try:
        check_replicas(engine, 7)
    except DivergedError as error:
        return str(error)
    return None


def command(world: World, folder: str, arguments: list[str], environment: dict[str, str]) -> list[Any]:
    """Runs `pretrain ARGUMENTS` as one rank, in a folder; returns its exit code and what it wrote to stderr."""
    from pretrain.cli import run

    os.environ.update(environment)
    os.chdir(folder)
    said = Path(f"stderr-{world.rank}.txt")
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    code = run(arguments)
    return [code, said.read_text()]
