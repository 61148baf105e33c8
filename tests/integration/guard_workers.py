"""What the ranks of the guard tests do: steps that are dropped, rehearsed, or go wrong on one rank."""

from typing import Any

from pretrain.dist import World
from pretrain.engine.engine import Engine
from pretrain.types import Batch
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


def accumulate(engine: Engine, world: World, step: int) -> None:
    """Forward and backward of a step, without its update."""
    micros = micro_batches(world, step)
    for micro in micros:
        engine.forward_backward(micro, world.size / global_batch(step).num_targets(), micro is micros[-1])


def dropped(world: World, cases: list[list[Any]]) -> list[list[Any]]:
    """Trains 4 steps, with a step dropped and one rehearsed before the third; returns those rows, those of an engine to
    which that did not happen, what the drop said, whether all stayed, and the loss scale before and after."""
    results = []
    for case in cases:
        engine = build(world, *case, micro=MICRO)
        rows = train(engine, world, range(2), MICRO)
        before, scale = snapshot(engine), engine.state.scalars()
        accumulate(engine, world, 7)
        update = engine.update(1e-2, drop=True)
        engine.rehearse(micro_batches(world, 8)[0])
        unchanged = all((a == b).all() for a, b in zip(before, snapshot(engine), strict=True))
        scales = [scale, engine.state.scalars()]
        rows += train(engine, world, range(2, 4), MICRO)
        plain = train(build(world, *case, micro=MICRO), world, range(4), MICRO)
        results.append([rows, plain, update.skipped, bool(unchanged), scales])
    return results
