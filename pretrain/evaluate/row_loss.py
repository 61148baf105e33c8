"""The loss of each row by itself, and which of two models is better by more than chance: a paired bootstrap.

both models read the same rows -> a sum of losses and a count a row -> rows drawn again and again, the same for both
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.errors import DataError
from pretrain.evaluate.loss import LossReport
from pretrain.model import Transformer
from pretrain.objective import Loss, LossOutput
from pretrain.types import IGNORE_INDEX, Batch, ModelOutput

MIN_ROWS = 5
_CHUNK = 100


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
    """Runs every batch; rows without targets are left out."""
    sums, counts = [np.zeros((0, 2))], [np.zeros(0)]
    for batch in batches:
        counts.append((batch.targets_BT != IGNORE_INDEX).sum(dim=1).double().numpy())
        sums.append(engine.evaluate_rows(batch.to(engine.device)).cpu().numpy())
    all_sums, all_counts = np.concatenate(sums), np.concatenate(counts)
    kept = all_counts > 0
    return RowSums(all_sums[kept, 0], all_sums[kept, 1], all_counts[kept])


@dataclass(frozen=True, slots=True)
class Difference:
    """A model's loss less a baseline's, on the same rows.

    Attributes:
        loss: Difference of the means over all targets, nats; below 0 the model is better.
        low: The 95% interval's lower end.
        high: Its upper end.
        p_value: Chance of a difference as large if they were equally good.
        num_rows: Rows that were drawn from.
        resamples: How often.
    """

    loss: float
    low: float
    high: float
    p_value: float
    num_rows: int
    resamples: int


def compare_rows(baseline: RowSums, model: RowSums, resamples: int, seed: int = 12345) -> Difference:
    """Draws rows with replacement, as many as there are, and takes the difference of the token means of each draw.

    The p-value is two-sided, from differences shifted to a mean of 0 (as sacrebleu's paired bootstrap does it).

    Raises:
        DataError: Too few rows to draw from.
    """
    assert np.array_equal(baseline.counts, model.counts), "both read the same rows"
    count = len(model.counts)
    if count < MIN_ROWS:
        raise DataError(
            f"{count} rows are too few to tell a difference from chance", fix="use a smaller --seq-len, or more data"
        )
    difference = model.nll - baseline.nll
    observed = float(difference.sum() / model.counts.sum())
    if not difference.any():
        return Difference(0.0, 0.0, 0.0, 1.0, count, resamples)
    rng = np.random.default_rng(seed)
    found = []
    for start in range(0, resamples, _CHUNK):
        drawn = rng.multinomial(count, np.full(count, 1 / count), size=min(_CHUNK, resamples - start))
        found.append(drawn @ difference / (drawn @ model.counts))
    draws = np.concatenate(found)
    low, high = np.quantile(draws, [0.025, 0.975])
    extreme = int((np.abs(draws - draws.mean()) >= abs(observed)).sum())
    return Difference(observed, float(low), float(high), (extreme + 1) / (resamples + 1), count, resamples)
