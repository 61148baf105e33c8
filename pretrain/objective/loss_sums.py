"""Named sums of a loss in one float64 vector, which engines and collectives add up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from pretrain.objective.loss import LossOutput


@dataclass(frozen=True, slots=True)
class SumLayout:
    """Places of named sums in one float64 vector.

    `sizes` are the numbers of their values, in order; None, of the last one alone: all that follow.
    """

    sizes: Mapping[str, int | None]

    def __len__(self) -> int:
        """Returns the number of values, without an open end."""
        return sum(size or 0 for size in self.sizes.values())

    def pack(self, sums: Mapping[str, Tensor]) -> Tensor:
        """Returns the vector, on the device of the sums."""
        return torch.cat([sums[name].double().flatten() for name in self.sizes])

    def unpack(self, values: Sequence[float]) -> dict[str, tuple[float, ...]]:
        """Returns the values of each sum."""
        rest = iter(values)
        return {name: tuple(islice(rest, size)) for name, size in self.sizes.items()}


LOSS_SUMS = SumLayout({"nll": 1, "correct": 1})
"""Layout of the sums of every loss: of -log p(target), and of correct targets."""

EVALUATED_SUMS = SumLayout({**LOSS_SUMS.sizes, "shown": None})
"""Layout in an evaluation: a loss of pairs without a reference shows its answers, however many."""


def pack_evaluated(loss: LossOutput) -> Tensor:
    """Returns the sums of an evaluation by `EVALUATED_SUMS`."""
    shown_M = loss.nll_sum.new_empty(0) if loss.shown_M is None else loss.shown_M
    return EVALUATED_SUMS.pack({"nll": loss.nll_sum, "correct": loss.num_correct, "shown": shown_M})
