"""Compares what every rank should hold alike: the working weights, at ZeRO 0 to 2, under DDP, and in one process.

    bits of each weight as integers  ->  their sum, wrapping at 64 bits  ->  one number a rank, gathered
    they differ                      ->  the sums of every weight are gathered too: who differs, and where first

A flipped bit in memory, a rank that missed an update, a kernel that is not what it is elsewhere: none of them shows in
a loss, and all of them end up in a checkpoint. At ZeRO 3 no weight is held twice, and there is nothing to compare.
"""

import socket
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from pretrain import dist
from pretrain.engine.engine import Engine
from pretrain.errors import DivergedError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(engine: Engine, step: int) -> None:
    """Compares the weights of all ranks. Collective; reads every weight once, and gathers eight bytes a rank.

    Raises:
        DivergedError: They differ; names the ranks in the minority, or all where there is none, and the first weight.
    """
    names, sums = zip(*bit_sums(engine.working_weights()), strict=True)
    each = torch.stack(sums)
    totals = dist.gather_objects(int(each.sum()))
    if len(set(totals)) == 1:
        return
    rows = dist.gather_objects({"sums": each.tolist(), "host": socket.gethostname()})
    odd = odd_ones(totals)
    differing = next(number for number in range(len(names)) if len({row["sums"][number] for row in rows}) > 1)
    listed = " and ".join(f"rank {rank} on {rows[rank]['host']}" for rank in odd)
    others = "no majority tells which is right" if len(odd) == len(rows) else f"the other {len(rows) - len(odd)} agree"
    raise DivergedError(
        f"the weights of {listed} differ at step {step}, first {names[differing]}; {others}",
        fix="the last checkpoint is from before; look for memory errors there, and resume without these machines",
    )


def bit_sums(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the sum of the bit patterns of each weight, int64 [], on its device."""
    for name, weight in weights:
        integers = weight.detach().reshape(-1).view(_INTEGERS[weight.element_size()])
        yield name, integers.sum(dtype=torch.int64)


def odd_ones(values: list[int]) -> list[int]:
    """Returns who has another value than most: all, where no value has more than any other."""
    counts = Counter(values).most_common()
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        return list(range(len(values)))
    return [rank for rank, value in enumerate(values) if value != counts[0][0]]
