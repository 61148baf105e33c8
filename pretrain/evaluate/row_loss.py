"""Loss over a validation split: the exact token mean over all ranks, and what follows from it."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pretrain import dist
from pretrain.evaluate.bootstrap import Difference, compare_means
from pretrain.evaluate.distributed import gather_batches
from pretrain.model import Transformer
from pretrain.objective import Loss, LossOutput
from pretrain.types import IGNORE_INDEX, Batch, ModelOutput


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
        num_correct: Targets with the largest score.
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
        tokens_per_byte: Tokens a byte of each text; 0: unknown.
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


# The loss of each row by itself: what two models that read the same rows are compared by
# (`bootstrap.py`).
#
# batch -> hidden states, once -> loss of one row after another -> a sum, right answers and a count
# a row -> all ranks'


class ModelLoss:
    """A model and a loss on one device: all that evaluation needs of an engine (`HasLoss`).

    Args:
        model: In eval mode.
        loss: Loss of its objective.
    """

    def __init__(self, model: Transformer, loss: Loss) -> None:
        self.device: torch.device = next(model.parameters()).device
        self._model, self._loss = model, loss

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """Returns the sum of -log p(target) over a batch, and the targets held for the likeliest: float64 [2]."""
        return _sums(self._loss(self._model, batch))

    @torch.no_grad()
    def evaluate_rows(self, batch: Batch) -> Tensor:
        """Returns the same for each row: float64 [B, 2]. The model reads the batch once."""
        hidden_BTD = self._model(batch, logits=False).hidden_BTD
        rows = (
            self._loss(_CachedLosses(self._model, hidden_BTD[row : row + 1]), _only(batch, row))
            for row in range(len(hidden_BTD))
        )
        return torch.stack([_sums(found) for found in rows])


def _sums(found: LossOutput) -> Tensor:
    return torch.stack((found.nll_sum.double(), found.num_correct.double()))


class _CachedLosses:
    """A model that has read a row already."""

    def __init__(self, model: Transformer, hidden_1TD: Tensor) -> None:
        self.head: Any = model.head
        self.vocab_size = model.vocab_size
        self._hidden_1TD = hidden_1TD

    def __call__(self, batch: Batch, *, logits: bool) -> ModelOutput:
        return ModelOutput(self._hidden_1TD)


def _only(batch: Batch, row: int) -> Batch:
    """Returns one row of a batch, but for its source."""
    width = batch.targets_BT.shape[1]
    target_positions_P = batch.target_positions_P
    if target_positions_P is not None:
        first = row * width
        is_own = (target_positions_P >= first) & (target_positions_P < first + width)
        target_positions_P = target_positions_P[is_own] - first
    one = slice(row, row + 1)
    return replace(
        batch,
        tokens_BT=batch.tokens_BT[one],
        targets_BT=batch.targets_BT[one],
        positions_BT=_sliced(batch.positions_BT, one),
        documents_BT=_sliced(batch.documents_BT, one),
        lengths_B=_sliced(batch.lengths_B, one),
        prefix_BT=_sliced(batch.prefix_BT, one),
        token_types_BT=_sliced(batch.token_types_BT, one),
        target_positions_P=target_positions_P,
        source=None,  # has been read
        sample_ids=batch.sample_ids[one],
    )


def _sliced(tensor: Tensor | None, rows: slice) -> Tensor | None:
    return None if tensor is None else tensor[rows]


@dataclass(frozen=True, slots=True)
class RowSums:
    """Losses of rows.

    Attributes:
        nll: float64 [rows]: sums of -log p(target).
        correct: float64 [rows]: targets held for the likeliest.
        counts: float64 [rows]: targets.
    """

    nll: np.ndarray
    correct: np.ndarray
    counts: np.ndarray

    @property
    def report(self) -> LossReport:
        """The mean over all targets."""
        count = self.counts.sum()
        return LossReport(float(self.nll.sum() / max(count, 1.0)), int(count), int(self.correct.sum()))

    def __add__(self, other: "RowSums") -> "RowSums":
        pairs = ((self.nll, other.nll), (self.correct, other.correct), (self.counts, other.counts))
        return RowSums(*(np.concatenate(pair) for pair in pairs))


def sum_rows(engine: ModelLoss, batches: Iterable[Batch]) -> RowSums:
    """Runs every batch; rows without targets are left out. Collective: the rows of all ranks, in the order of one."""
    found = []
    for batch in batches:
        counts = (batch.targets_BT != IGNORE_INDEX).sum(dim=1)
        sums = engine.evaluate_rows(batch.to(engine.device)).cpu()
        found.append([[*row, count] for row, count in zip(sums.tolist(), counts.tolist(), strict=True) if count])
    rows = np.array([row for batch in gather_batches(found) for row in batch], dtype=np.float64).reshape(-1, 3)
    return RowSums(rows[:, 0], rows[:, 1], rows[:, 2])


def compare_rows(baseline: RowSums, model: RowSums, resamples: int, unit: str = "rows") -> dict[str, Difference]:
    """Returns the differences in the mean loss over all targets, and in the share of right answers.

    Rows are drawn with replacement, as many as there are, the same for both. Rows, not tokens: those of a text are not
    independent.

    Raises:
        DataError: Too few rows.
    """
    assert np.array_equal(baseline.counts, model.counts), "both read the same rows"
    return {
        "loss": compare_means(baseline.nll, model.nll, model.counts, resamples, unit),
        "accuracy": compare_means(baseline.correct, model.correct, model.counts, resamples, unit),
    }
