"""Loss over a validation split: the exact token mean over all ranks, and what follows from it."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pretrain import dist
from pretrain.types import Batch


class HasLoss(Protocol):
    """What evaluation needs of an engine."""

    device: torch.device

    def loss_sum(self, batch: Batch) -> Tensor:
        """Returns the sum of the token losses of a batch."""
        ...


@dataclass(frozen=True, slots=True)
class LossReport:
    """Loss over a text.

    Attributes:
        loss: Mean over target tokens, nats.
        num_targets: Tokens it was taken over.
    """

    loss: float
    num_targets: int

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def bits_per_byte(self, tokens_per_byte: float) -> float:
        """Returns the loss in bits for each UTF-8 byte of the text, which tokenizers do not change."""
        return self.loss / math.log(2) * tokens_per_byte


def evaluate_loss(engine: HasLoss, batches: Iterable[Batch], should_stop: Callable[[], bool]) -> LossReport | None:
    """Runs every batch without gradients. Collective.

    Args:
        engine: Model and objective.
        batches: This rank's share; every rank has the same number.
        should_stop: Collective answer whether to give up; asked now and then.

    Returns:
        The mean over all ranks' targets, or None when it was given up.
    """
    loss_sum, num_targets = 0.0, 0
    for number, batch in enumerate(batches):
        if number % 16 == 15 and should_stop():
            return None
        loss_sum += float(engine.loss_sum(batch.to(engine.device)))
        num_targets += batch.num_targets()
    mine = torch.tensor([loss_sum, float(num_targets)], dtype=torch.float64, device=engine.device)
    total_loss, total = dist.all_reduce_sum(mine).tolist()
    return LossReport(total_loss / max(total, 1.0), int(total))
