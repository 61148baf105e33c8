"""Evaluation on several ranks: torchrun starts them, each reads its share, and all of them know the result.

    torchrun --nproc-per-node 4 -m pretrain evaluate runs/quickstart

Each rank holds the whole model. Batches are those of one rank, dealt out in turn, and sums are float64: the figures are
those of one rank. Rank 0 prints.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrain import dist
from pretrain.artifact.model_path import open_source
from pretrain.artifact.source import ModelSource
from pretrain.dist import World, read_world

ALONE = World(0, 1, 0)


@contextlib.contextmanager
def joined_ranks(device: str) -> Iterator[tuple[World, str]]:
    """Joins the ranks that a launcher has started, if one has; yields this process's place, and its device.

    Args:
        device: Device as in `open_artifact`; each rank takes the GPU of its local rank.

    Raises:
        ConfigError: The launcher's environment is incomplete.
    """
    world = read_world() if "RANK" in os.environ else ALONE
    if world.size == 1:
        yield world, device
        return
    import torch
    import torch.distributed as td

    on_cuda = device in ("auto", "cuda") and torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(world.local_rank)
    td.init_process_group("nccl" if on_cuda else "gloo", rank=world.rank, world_size=world.size)
    try:
        yield world, f"cuda:{world.local_rank}" if on_cuda else device
    finally:
        td.destroy_process_group()


def open_together(path: Path) -> ModelSource:
    """Describes a model; of a run that goes on all ranks take the checkpoint that rank 0 found. Collective.

    Raises:
        CheckpointError: No intact checkpoint is at the path.
        ConfigError: The config of the model is damaged.
    """
    source = open_source(path)
    chosen = dist.broadcast_object(str(source.path))
    return source if str(source.path) == chosen else open_source(Path(chosen))


def gather_batches(found: list[Any]) -> list[Any]:
    """Returns what all ranks have found, batch by batch, in the order in which one rank would have. Collective.

    Args:
        found: JSON-able, one for each batch of this rank; every rank has as many.
    """
    by_rank = dist.gather_objects(found)
    return [batch for batches in zip(*by_rank, strict=True) for batch in batches]


def deal(count: int) -> range:
    """Returns this rank's share of so many items, in turn."""
    rank, size = current()
    return range(rank, count, size)


def collect(found: dict[int, Any], count: int) -> list[Any]:
    """Returns all items in order, each from the rank that `deal` gave it to. Collective."""
    whole: dict[int, Any] = {}
    for part in dist.gather_objects(sorted(found.items())):
        whole |= dict(part)
    assert len(whole) == count
    return [whole[number] for number in range(count)]


def current() -> tuple[int, int]:
    """Returns rank and number of ranks."""
    if not dist.is_distributed():
        return 0, 1
    import torch.distributed as td

    return td.get_rank(), td.get_world_size()
