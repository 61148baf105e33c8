"""One rank of benchmarks/trainer.py: builds all arms, counts what they send, measures them."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import measure
from benchmarks.trainer_counts import clock_loop, count_traffic
from benchmarks.trainer_ours import BLOCK_STEPS, COMPARED_STEPS, RANKS, SIZES, Trainer, plan_run
from benchmarks.trainer_peers import BareLoop, build_peers, forget_accelerate
from pretrain import dist
from pretrain.data.loader import StepBatch
from pretrain.dist import World
from pretrain.types import Batch
from pretrain.utils.log import quiet_libraries, setup_logging


def run_job(world: World, size: str, stage: int, folder: str, rounds: int) -> dict[str, Any]:
    """What each rank does for one row; returns its times, losses and counts."""
    setup_logging(world.rank, world.size, Path(folder) / f"logs/rank-{world.rank}.log")
    ours = {}
    for name in ("ours", "ours_again"):
        forget_accelerate()
        ours[name] = Trainer(plan_run(folder, name, SIZES[size], stage), world)
    quiet_libraries()
    # One more than is compared: the ledger's row of a step is written after the fetch of the next one.
    for trainer in ours.values():
        trainer.take(COMPARED_STEPS + 1)
    first = ours["ours"]
    peers = build_peers(first.run, first.run.config, scaled_batches(first.steps.first))
    losses = {name: [float(loss) for loss in peer.take(COMPARED_STEPS + 1)[:-1]] for name, peer in peers.items()}
    if world.is_main:
        losses |= {name: trainer.losses() for name, trainer in ours.items()}
    arms: dict[str, Trainer | BareLoop] = {**ours, **peers}
    traffic = {name: count_traffic(arm) for name, arm in arms.items()}
    blocks = {name: partial(arm.take, BLOCK_STEPS) for name, arm in arms.items()}
    timings = measure(blocks, rounds, before=torch.distributed.barrier)
    loop = clock_loop(first, 5 * BLOCK_STEPS)
    for trainer in ours.values():
        trainer.close()
    times = {name: [[run.cpu_s, run.wall_s] for run in runs] for name, runs in timings.items()}
    return {"losses": losses, "traffic": traffic, "times": times, "loop": loop}


def scaled_batches(steps: list[StepBatch]) -> list[tuple[Batch, float]]:
    """Returns this rank's batches of some steps, each with the scale that makes its sum of losses a global mean."""
    num_targets = dist.all_reduce_sum(torch.tensor([step.counts.num_targets for step in steps])).tolist()
    return [(step.micro_batches[0], RANKS / total) for step, total in zip(steps, num_targets, strict=True)]
