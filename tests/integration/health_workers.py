"""Ranks whose health is judged from times that the test chooses."""

from pathlib import Path

import torch
import torch.distributed as td

from pretrain import dist
from pretrain.dist import World
from pretrain.run.folder import RunDir, begin_attempt
from pretrain.training.health.rank_health import RankHealth


def judge(world: World, folder: str, steps: int, slow: list[int]) -> list[list[object]]:
    """Takes steps whose forward pass lasts 1.2 times as long on rank 1 in the steps `slow`; returns what each rank
    has told of them, and the metrics that are not those of the step before."""
    td.init_process_group("gloo", rank=world.rank, world_size=world.size)
    run = RunDir(Path(folder))
    if world.is_main:
        begin_attempt(run, "slow", {})
    health = RankHealth(world, run, torch.device("cpu"), (0, steps))
    told: list[list[object]] = []
    metrics: dict[str, float] = {}
    for step in range(1, steps + 1):
        forward_s = 1.2 if world.rank == 1 and slow[0] <= step <= slow[1] else 1.0
        totals = torch.tensor(health.measures(forward_s), dtype=torch.float64)
        health.judge(step, dist.all_reduce_sum(totals).tolist(), lambda *texts, at=step: told.append([at, *texts]))
        if metrics.keys() != health.metrics().keys():
            told.append([step, {name: round(value, 6) for name, value in health.metrics().items()}])
        metrics = health.metrics()
    td.destroy_process_group()
    return told
