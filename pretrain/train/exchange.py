"""The one collective that the loop adds to a step.

At the end of each step the ranks sum a few numbers: the loss and sample digest of the step that is done, the target
count of the step that comes (its loss scale needs the global count before the backward pass), and whether anyone was
asked to stop. Everybody gets the same sums, so everybody takes the same decision at the same step.
"""

from dataclasses import dataclass

import torch

from pretrain import dist
from pretrain.data.digest import join64, split64


@dataclass(frozen=True, slots=True)
class Done:
    """This rank's share of a finished step."""

    loss_sum: float
    digest: int


@dataclass(frozen=True, slots=True)
class Agreed:
    """The sums over all ranks.

    Attributes:
        loss_sum: Sum of the token losses of the finished step.
        digest: Digest of its global sample ids, 64 bits.
        next_targets: Target tokens of the coming step.
        stop: Whether any rank was asked to stop.
    """

    loss_sum: float
    digest: int
    next_targets: int
    stop: bool


def exchange(done: Done | None, next_targets: int, stop: bool, device: torch.device) -> Agreed:
    """Sums over the ranks. Collective; one all-reduce of five float64 values."""
    high, low = split64(done.digest) if done else (0.0, 0.0)
    loss_sum = done.loss_sum if done else 0.0
    mine = [loss_sum, high, low, float(next_targets), float(stop)]
    values = dist.all_reduce_sum(torch.tensor(mine, dtype=torch.float64, device=device)).tolist()
    digest = join64(values[1], values[2])
    return Agreed(values[0], digest, int(values[3]), values[4] > 0)
