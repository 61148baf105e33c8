"""The loss of each row by itself: what two models that read the same rows are compared by (`bootstrap.py`).

batch -> hidden states, once -> loss of one row after another -> a sum, right answers and a count a row -> all ranks'
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.evaluate.bootstrap import Difference, compare_means
from pretrain.evaluate.loss import LossReport
from pretrain.evaluate.ranks import gather_batches
from pretrain.model import Transformer
from pretrain.objective import Loss, LossOutput
from pretrain.types import IGNORE_INDEX, Batch, ModelOutput


class ModelLoss:
    """A model and a loss on one device: all that evaluation needs of an engine (`HasLoss`).

    Args:
        model: In eval mode.
        loss: Of its objective.
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
            self._loss(_Read(self._model, hidden_BTD[row : row + 1]), _only(batch, row))
            for row in range(len(hidden_BTD))
        )
        return torch.stack([_sums(found) for found in rows])


def _sums(found: LossOutput) -> Tensor:
    return torch.stack((found.nll_sum.double(), found.num_correct.double()))


class _Read:
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
    places_P = batch.places_P
    if places_P is not None:
        places_P = places_P[(places_P >= row * width) & (places_P < (row + 1) * width)] - row * width
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
        places_P=places_P,
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
