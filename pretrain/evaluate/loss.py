"""Loss over a validation split: the exact token mean over all ranks, and what follows from it."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pretrain import dist
from pretrain.types import Batch


class HasLoss(Protocol):
    """What evaluation needs of an engine."""

    device: torch.device

    def evaluate(self, batch: Batch) -> Tensor:
        """Returns the sum of -log p(target) over a batch, and the targets held for the likeliest: float64 [2]."""
        ...


@dataclass(frozen=True, slots=True)
class LossReport:
    """Loss over a text.

    Attributes:
        loss: Mean over target tokens, nats.
        num_targets: Tokens it was taken over.
        num_correct: Of these, those that the model held for the likeliest.
    """

    loss: float
    num_targets: int
    num_correct: int

    @property
    def accuracy(self) -> float:
        """Share of the targets that the model held for the likeliest."""
        return self.num_correct / max(self.num_targets, 1)

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def bits_per_byte(self, tokens_per_byte: float) -> float:
        """Returns the loss in bits for each UTF-8 byte of the text, which tokenizers do not change."""
        return self.loss / math.log(2) * tokens_per_byte


def pool(reports: Sequence[LossReport], tokens_per_byte: Sequence[float]) -> tuple[LossReport, float | None]:
    """Returns the mean over the targets of several texts; and their bits over their bytes, where these are known.

    Args:
        reports: One a text.
        tokens_per_byte: Of each text; 0: not known.
    """
    count = sum(report.num_targets for report in reports)
    loss = sum(report.loss * report.num_targets for report in reports) / max(count, 1)
    whole = LossReport(loss, count, sum(report.num_correct for report in reports))
    if not count or not all(tokens_per_byte):
        return whole, None
    num_bytes = sum(report.num_targets / ratio for report, ratio in zip(reports, tokens_per_byte, strict=True))
    return whole, whole.bits_per_byte(count / num_bytes)


def evaluate_loss(engine: HasLoss, batches: Iterable[Batch], should_stop: Callable[[], bool]) -> LossReport | None:
    """Runs every batch without gradients. Collective.

    Args:
        engine: Model and objective.
        batches: This rank's share; every rank has the same number.
        should_stop: Collective answer whether to give up; asked now and then.

    Returns:
        The mean over all ranks' targets, or None when it was given up.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=engine.device)
    for number, batch in enumerate(batches):
        if number % 16 == 15 and should_stop():
            return None
        num_targets = batch.num_targets()
        sums[:2] += engine.evaluate(batch.to(engine.device))
        sums[2] += num_targets
    loss_sum, num_correct, num_targets = dist.all_reduce_sum(sums).tolist()
    return LossReport(loss_sum / max(num_targets, 1.0), int(num_targets), int(num_correct))
