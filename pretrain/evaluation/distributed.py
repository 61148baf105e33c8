"""Evaluation on several ranks: torchrun starts them, each reads its share, and all have the result.

    torchrun --nproc-per-node 4 -m pretrain evaluate runs/quickstart

Each rank holds the whole model. Batches are those of one rank, dealt out in turn, and sums are
float64, so that the figures are those of one rank. Rank 0 prints.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from pretrain import dist
from pretrain.artifact.model_path import open_source
from pretrain.artifact.source import ModelSource
from pretrain.dist import World, read_world
from pretrain.errors import LaunchError
from pretrain.utils.status_line import stderr_console

_WAIT = timedelta(hours=6)
"""Wait for another rank: shares of long answers differ, and rank 0 resamples scores."""

Item = TypeVar("Item")


@contextlib.contextmanager
def joined_ranks(device: str) -> Iterator[tuple[World, str]]:
    """Joins the ranks of a launcher, if there is one; yields this process's rank and its device.

    `device` is that of `open_artifact`; each rank takes the GPU of its local rank. Raises:
    ConfigError: The launcher's environment is incomplete.
    """
    world = read_world() if "RANK" in os.environ else World(0, 1, 0)
    if world.size == 1:  # no group, and no torch
        yield world, device
        return
    import torch
    import torch.distributed as td

    on_cuda = device in ("auto", "cuda") and torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(world.local_rank)
    backend = "nccl" if on_cuda else "gloo"
    with dist.loopback_store(world):
        td.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=_WAIT)
    yield world, f"cuda:{world.local_rank}" if on_cuda else device
    # Not after an error, whose message would wait for the others: NCCL destroys a group together.
    td.destroy_process_group()


def current() -> tuple[int, int]:
    """Returns rank and number of ranks."""
    if not dist.is_distributed():
        return 0, 1
    import torch.distributed as td

    return td.get_rank(), td.get_world_size()


def open_together(path: Path) -> ModelSource:
    """Describes a model, by the checkpoint that rank 0 found in an active run. Collective."""
    source = open_source(path)
    chosen = dist.broadcast_object(str(source.path))
    return source if str(source.path) == chosen else open_source(Path(chosen))


def gather_batches(found: list[Any]) -> list[Any]:
    """Returns the results of all ranks in the order of one rank. Collective.

    `found` has a JSON-able entry for each batch of this rank; every rank has as many.
    """
    by_rank = dist.gather_objects(found)
    return [batch for batches in zip(*by_rank, strict=True) for batch in batches]


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """Context of work of each rank by itself; an exception of one is raised on all. Collective.

    Raises: LaunchError: Another rank failed, in its words.
    """
    problem = None
    try:
        yield
    except Exception as error:  # of any kind: the others go on to what comes next
        problem = error
    said = None if problem is None else f"{type(problem).__name__}: {problem}".splitlines()[0]
    by_rank = dist.gather_objects(said)
    if problem is not None:
        raise problem
    for rank, text in enumerate(by_rank):
        if text is not None:
            raise LaunchError(f"rank {rank} failed: {text}")


def deal(count: int) -> range:
    """Returns this rank's share of `count` items, in turn."""
    rank, size = current()
    return range(rank, count, size)


def collect(found: dict[int, Any], count: int) -> list[Any]:
    """Returns all items in order, each from the rank that `deal` gave it to. Collective."""
    parts = dist.gather_objects(sorted(found.items()))
    whole = {number: item for part in parts for number, item in part}
    assert len(whole) == count
    return [whole[number] for number in range(count)]


def with_bar(items: Iterable[Item], label: str, total: int) -> Iterator[Item]:
    """Yields the items, with a progress bar on the terminal of rank 0."""
    from rich.progress import track

    console = stderr_console()
    hidden = not console.is_terminal or current()[0] != 0
    yield from track(items, label, total=total, console=console, transient=True, disable=hidden)
