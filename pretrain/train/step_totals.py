"""The one collective that the loop adds to a step: an all-reduce of a few float64 values, beside the optimizer.

    losses of the ending step | its counters | counters of the coming step | flags: no coming step, part written, stop

The coming step is here because its loss scale needs the global number of targets before its backward pass. All ranks
get the same sums, so all take the same decision at the same step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain import dist
from pretrain.data.loader import StepCounts


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over all ranks.

    Attributes:
        loss_sum: Sum of -log p(target) over the ending step.
        num_correct: Targets of the ending step that are the model's most likely token.
        by_source: For a mixture the sum of -log p(target) over each source, then the targets of each; else empty.
        done: Counters of the ending step.
        coming: Counters of the coming step; None where a rank has none.
        num_written: Ranks whose part of the save in flight is written, or has failed.
        stop: Whether any rank was asked to stop.
    """

    loss_sum: float
    num_correct: int
    by_source: tuple[float, ...]
    done: StepCounts
    coming: StepCounts | None
    num_written: int
    stop: bool


def start_exchange(
    sums: Tensor, done: StepCounts, coming: StepCounts | None, *, stop: bool = False, is_written: bool = False
) -> Callable[[], StepTotals]:
    """Begins the all-reduce; returns the function that waits for it. Collective.

    Args:
        sums: Sums of the engine over this rank's micro-batches: float64 [2 + 2 per source], on its device; not read
            here, so that the host does not wait for the backward pass.
        done: Counters of this rank's rows in the ending step.
        coming: Counters of this rank's rows in the coming step; None where none comes.
        stop: Whether this rank was asked to stop.
        is_written: Whether this rank's part of the save in flight is written, or has failed.
    """
    parts = [done.pack(), (coming or StepCounts()).pack(), (float(coming is None), float(is_written), float(stop))]
    host = torch.tensor([value for part in parts for value in part], dtype=torch.float64)
    values = torch.cat([sums, host.to(sums.device, non_blocking=True)])
    wait = dist.start_all_reduce_sum(values)

    def finish() -> StepTotals:
        wait()
        totals = values.cpu().split([len(sums), *map(len, parts)])
        (loss_sum, num_correct, *by_source), ending, following, flags = (part.tolist() for part in totals)
        num_missing, num_written, num_stops = flags
        return StepTotals(
            loss_sum=loss_sum,
            num_correct=int(num_correct),
            by_source=tuple(by_source),
            done=StepCounts.unpack(ending),
            coming=None if num_missing else StepCounts.unpack(following),
            num_written=int(num_written),
            stop=num_stops > 0,
        )

    return finish
