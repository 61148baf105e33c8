"""What the ranks of the tests of expert parallelism do: the same as of experts, with experts over ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from pretrain.checkpoint.load import load_checkpoint
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.state import TrainState
from pretrain.dist import World
from pretrain.model.parts.experts import Router
from pretrain.types import Batch
from tests.integration import experts_workers
from tests.integration.experts_workers import EXPERTS, mixture
from tests.integration.guard_workers import compared
from tests.integration.workers import MODEL, build, global_batch, train

DIVISIBLE = {
    "loss": EXPERTS["loss"] | {"count": 8},
    "bias": EXPERTS["bias"] | {"count": 8},
    "thirds": EXPERTS["loss"] | {"count": 6},
    "one each": EXPERTS["loss"] | {"count": 4},
    "encoder": EXPERTS["loss"] | {"count": 4},
}
"""Experts that 2 and 4 ranks share, of widths that partitions cut."""


def shared(world: World, function: str, experts: int, sequence: int, arguments: dict[str, Any], biases: bool) -> Any:
    """Calls a function of `experts_workers` with experts over ranks, with or without biases of linear layers."""
    with mock.patch.dict(EXPERTS, DIVISIBLE), mock.patch.dict(MODEL["decoder"], bias=biases):
        place = replace(world, experts=experts, sequence=sequence)
        return getattr(experts_workers, function)(place, **arguments)


def moved(world: World, folder: str, cases: list[list[Any]], micro: int) -> list[list[list[float]]]:
    """Trains 3 steps by each (experts, balance, kind, stage, ...) in turn, from the checkpoint of the one before.

    Returns rows of each; after all, those of the same steps without a checkpoint between them.
    """
    found, step = [], 0
    with mock.patch.dict(EXPERTS, DIVISIBLE):
        for experts, balance, *case in cases:
            place = replace(world, experts=experts)
            engine = build(place, *case, micro=micro, model=mixture(balance), sharded=case[1] == 3)
            if step:
                load_checkpoint(Path(folder) / f"step-{step:08}", engine.state)
            found.append(train(engine, place, range(step, step + 3), micro))
            step += 3
            state = TrainState(step=step, optimizer_step=step)
            CheckpointManager(Path(folder), 9, world, {}).save(engine.state, state)
    return found


def replicas(world: World, experts: int, stage: int, changed: dict[str, str]) -> list[str | None]:
    """What the comparison says: of equal weights, of changed experts by rank, and of a norm that rank 3 changed."""
    place = replace(world, experts=experts)
    with mock.patch.dict(EXPERTS, DIVISIBLE):
        engine = build(place, "deepspeed", stage, "fp32", micro=3, model=mixture("loss"))
    train(engine, place, range(2), 3)
    said = [compared(engine)]
    weights = dict(engine.working_weights())
    with torch.no_grad():
        for name in [changed[str(world.rank)]] if str(world.rank) in changed else []:
            weights[f"decoder.blocks.0.feedforward.{name}.weight"].view(-1)[0] += 1
        said.append(compared(engine))
        if world.rank == 3:
            weights["decoder.norm.weight"][0] += 1
    return [*said, compared(engine)]


def uneven_tiles(world: World, experts: int, stage: int, tiles: int) -> list[float]:
    """Trains 3 steps on two micro-batches of very different sizes, one a rank; returns the losses of the step."""
    place = replace(world, experts=experts)
    kind = "deepspeed" if world.size > 1 else "single"
    with mock.patch.dict(EXPERTS, DIVISIBLE):
        model = mixture("bias")
        engine = build(place, kind, stage, "fp32", micro=6, model=model, tiles=tiles, sharded=stage == 3)
    found = []
    for step in range(3):
        whole = global_batch(step)
        # Tokens of one row, and of three: a row of 5 columns has fewer tokens than tiles.
        parts = [
            Batch(whole.tokens_BT[:1, :5], whole.targets_BT[:1, :5]),
            Batch(whole.tokens_BT[1:4], whole.targets_BT[1:4]),
        ]
        scale = world.size / sum(part.num_targets() for part in parts)
        mine = parts[world.rank : world.rank + 1] if world.size > 1 else parts
        total = torch.stack([engine.forward_backward(part, scale, part is mine[-1])[0] for part in mine]).sum()
        if world.size > 1:
            torch.distributed.all_reduce(total)
        engine.update(1e-2)
        found.append(float(total))
    return found


def adversarial(world: World, experts: int, case: list[Any], steps: int, micro: int) -> dict[str, Any]:
    """Trains while the expert of a token is a function of token and step, in a third of the steps the same for all.

    Returns the losses, the experts that had no token of this rank in a step in which they had one of another, and the
    number of steps in which one expert had all tokens of all ranks.
    """
    place = replace(world, experts=experts)
    with mock.patch.dict(EXPERTS, {"one choice": DIVISIBLE["loss"] | {"top_k": 1, "normalize": False}}):
        engine: Any = build(place, *case, micro=micro, model=mixture("one choice"))
    seen: dict[str, Any] = {}
    engine.module.register_forward_pre_hook(lambda _, given: seen.update(tokens=given[0].tokens_BT.flatten()))
    loads = torch.zeros(steps, DIVISIBLE["loss"]["count"], dtype=torch.int64)
    whole = Router.forward

    def forced(router: Router, x_PD: Tensor, counted_P: Tensor | None) -> Any:
        step, count = seen["step"], router.config.count
        of_token = (0 * seen["tokens"], seen["tokens"] // 8, seen["tokens"] % 2)[step % 3]
        experts_P1 = ((of_token + step) % count)[:, None]
        scores_PE = torch.nn.functional.linear(x_PD, router.weight).softmax(dim=-1)
        load_E = torch.bincount(experts_P1.flatten(), minlength=count)
        loads[step] += load_E
        sums = torch.cat((load_E.float(), scores_PE.sum(dim=0), torch.zeros(2)))
        return experts_P1, scores_PE.gather(1, experts_P1), sums

    rows = []
    with mock.patch.object(Router, "forward", forced):
        for step in range(steps):
            seen["step"] = step
            rows += train(engine, place, range(step, step + 1), micro, lr=1e-3)
    assert whole is Router.forward
    total = loads.clone()
    if world.size > 1:
        torch.distributed.all_reduce(total)
    starved = ((loads == 0) & (total > 0)).any(dim=0)
    alone = ((total > 0).sum(dim=1) == 1).sum()
    return {"losses": [row[0] for row in rows], "starved": starved.tolist(), "alone": int(alone)}
