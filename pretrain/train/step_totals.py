"""The one collective that the loop adds to a step.

The ranks sum a few numbers while the optimizer works: the loss and sample digest of the step that is ending, the target
count of the step that comes (its loss scale needs the global count before the backward pass) and its digest, how many
ranks have written their part of a checkpoint, and whether anyone was asked to stop. Everybody gets the same sums, so
everybody takes the same decision at the same step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain import dist
from pretrain.data.loader import join64, split64


@dataclass(frozen=True, slots=True)
class StepTotals:
    """The sums over all ranks.

    Attributes:
        loss_sum: Sum of -log p(target) over the ending step.
        num_correct: Its targets that the model held for the likeliest.
        digest: Digest of its global sample ids, 64 bits.
        num_skipped: Its rows that could not be read.
        num_tokens: Tokens that it read.
        next_targets: Target tokens of the coming step.
        num_written: Ranks whose part of the save in flight is done, or has failed.
        stop: Whether any rank was asked to stop.
        by_source: Of a mixture: the sum of -log p(target) over each source, then the targets of each; else empty.
        next_digest: Digest of the global sample ids of the coming step; None where some rank has none.
    """

    loss_sum: float
    num_correct: int
    digest: int
    num_skipped: int
    num_tokens: int
    next_targets: int
    num_written: int
    stop: bool
    by_source: tuple[float, ...] = ()
    next_digest: int | None = None


def start_exchange(
    sums: Tensor,
    digest: int,
    num_skipped: int,
    num_tokens: int,
    next_targets: int,
    stop: bool,
    is_written: bool = False,
    next_digest: int | None = None,
) -> Callable[[], StepTotals]:
    """Begins the exchange; returns the function that waits for it. Collective; one all-reduce of twelve float64 values.

    Two more a source, where the step is told by source.

    Args:
        sums: What the engine gave for this rank's micro-batches, added up: float64 [2 or more] on its device;
            not read here.
        digest: Of this rank's rows.
        num_skipped: Of this rank's rows, those that could not be read.
        num_tokens: That this rank's micro-batches read.
        next_targets: Of this rank's rows in the coming step; 0 where none comes.
        stop: Whether this rank was asked to stop.
        is_written: Whether this rank's part of the save in flight is done, or has failed.
        next_digest: Of this rank's rows in the coming step; None where none comes.
    """
    coming = (float(next_digest is None), *split64(next_digest or 0))
    counts = [*split64(digest), num_skipped, num_tokens, next_targets, float(is_written), float(stop), *coming]
    host = torch.tensor([0.0, 0.0, *counts, *([0.0] * (len(sums) - 2))], dtype=torch.float64)
    values = host.to(sums.device, non_blocking=True)
    values[:2], values[2 + len(counts) :] = sums[:2], sums[2:]
    wait = dist.start_all_reduce_sum(values)

    def finish() -> StepTotals:
        wait()
        total, correct, high, low, skipped, tokens, targets, written, stops, *rest = values.tolist()
        missing, next_high, next_low, *by_source = rest
        return StepTotals(
            loss_sum=total,
            num_correct=int(correct),
            digest=join64(high, low),
            num_skipped=int(skipped),
            num_tokens=int(tokens),
            next_targets=int(targets),
            num_written=int(written),
            stop=stops > 0,
            by_source=tuple(by_source),
            next_digest=None if missing else join64(next_high, next_low),
        )

    return finish
