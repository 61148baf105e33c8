"""What the ranks of the test of norms by layer do: two steps under each engine, the second one measured."""

from typing import Any

import torch

from pretrain.dist import World
from pretrain.training.layer_norms import LayerNorms
from tests.integration.workers import ROWS, build, global_batch, rows_of


def norms_of(world: World, cases: list[list[Any]]) -> list[list[Any]]:
    """Of each (kind, stage, precision, ...): the global gradient norm of the step, and what is told by layer."""
    found = []
    for case in cases:
        engine: Any = build(world, *case, micro=ROWS // world.size)
        optimizer = engine._optimizer if hasattr(engine, "_optimizer") else engine._wrapped.basic_optimizer
        names = [name for name, _ in engine.module.model.named_parameters()]
        norms = LayerNorms(names, optimizer, engine.state, is_cut=case[1] > 0)
        for step in range(2):
            whole = global_batch(step)
            mine = rows_of(whole, slice(world.rank * ROWS // world.size, (world.rank + 1) * ROWS // world.size))
            engine.forward_backward(mine, world.size / whole.num_targets(), True)
            if step:
                norms.arm()
            update = engine.update(1e-2)
        found.append([update.grad_norm, norms.take(update, torch.device("cpu"))])
    return found
