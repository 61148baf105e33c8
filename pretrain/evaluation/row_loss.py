"""Loss over a validation split, the exact token mean over all ranks, and of each row by itself.

    evaluate_loss   batch -> sum, right answers and count                       -> LossReport
    sum_rows        batch -> hidden states, once -> the same of one row at a time -> RowSums

Two models that read the same rows are compared by the latter (`bootstrap`).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pretrain import dist
from pretrain.evaluation.bootstrap import Difference, compare_means
from pretrain.evaluation.distributed import gather_batches
from pretrain.model import Transformer
from pretrain.objective import Loss
from pretrain.objective.loss_sums import EVALUATED_SUMS, LOSS_SUMS, SumLayout, pack_evaluated
from pretrain.rows import IGNORE_INDEX, move_places
from pretrain.types import Batch, ModelOutput


class HasLoss(Protocol):
    """The part of an engine that evaluation uses."""

    device: torch.device

    def evaluate(self, batch: Batch) -> Tensor:
        """Returns the sums of a batch by `EVALUATED_SUMS`."""
        ...


@dataclass(frozen=True, slots=True)
class LossReport:
    """Loss over a text: the mean over target tokens in nats, and the number of right answers."""

    loss: float
    num_targets: int
    num_correct: int
    shown: tuple[float, ...] = ()  # means of what the loss shows besides (`Objective.shown`)

    @property
    def accuracy(self) -> float:
        """Share of the targets with the largest score."""
        return self.num_correct / max(self.num_targets, 1)

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def bits_per_byte(self, tokens_per_byte: float) -> float:
        """Returns bits for each UTF-8 byte of the text, comparable between tokenizers."""
        return self.loss / math.log(2) * tokens_per_byte

    def facts(self) -> dict[str, Any]:
        """Returns plain values."""
        facts = {"loss": self.loss, "perplexity": self.perplexity, "accuracy": self.accuracy}
        return facts | {"targets": self.num_targets, "correct": self.num_correct}


def pool(reports: Sequence[LossReport], tokens_per_byte: Sequence[float]) -> tuple[LossReport, float | None]:
    """Returns the mean over the targets of several texts, and their bits per byte, if known.

    `tokens_per_byte` is 0 for a text where it is unknown.
    """
    count = sum(report.num_targets for report in reports)
    loss = sum(report.loss * report.num_targets for report in reports) / max(count, 1)
    weighted = ([value * report.num_targets for value in report.shown] for report in reports)
    shown = tuple(sum(values) / max(count, 1) for values in zip(*weighted, strict=True))
    whole = LossReport(loss, count, sum(report.num_correct for report in reports), shown)
    if not count or not all(tokens_per_byte):
        return whole, None
    pairs = zip(reports, tokens_per_byte, strict=True)
    num_bytes = sum(report.num_targets / ratio for report, ratio in pairs)
    return whole, whole.bits_per_byte(count / num_bytes)


def evaluate_loss(engine: HasLoss, batches: Iterable[Batch], should_stop: Callable[[], bool]) -> LossReport | None:
    """Returns the mean over all ranks' targets; None if stopped. Collective, without gradients.

    `batches` are this rank's share, as many on every rank; `should_stop` is a collective request,
    polled every 16 batches.
    """
    total_targets = 0
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for number, batch in enumerate(batches):
        if number % 16 == 15 and should_stop():
            return None
        total_targets += batch.num_targets()
        of_batch = engine.evaluate(batch.to(engine.device))
        total = of_batch + total if number else of_batch
    layout = SumLayout({"targets": 1, **EVALUATED_SUMS.sizes})
    whole = torch.cat((total.new_full((1,), total_targets), total))
    sums = layout.unpack(dist.all_reduce_sum(whole).tolist())
    count = max(sums["targets"][0], 1.0)
    means = tuple(value / count for value in sums["shown"])
    return LossReport(sums["nll"][0] / count, int(sums["targets"][0]), int(sums["correct"][0]), means)


class ModelLoss:
    """A model in eval mode and a loss on one device, as `HasLoss`."""

    def __init__(self, model: Transformer, loss: Loss) -> None:
        self.device: torch.device = next(model.parameters()).device
        self._model, self._loss = model, loss

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """Returns the sums of a batch by `EVALUATED_SUMS`."""
        return pack_evaluated(self._loss(self._model, batch))

    @torch.no_grad()
    def evaluate_rows(self, batch: Batch) -> Tensor:
        """Returns the sums of each row by `LOSS_SUMS`, float64 [B, 2]. The model reads the batch once.

        One with a generator, which makes the rows that it reads, reads each by itself.
        """
        generates = getattr(self._model, "generator", None) is not None
        hidden_BTD = None if generates else self._model(batch, logits=False).hidden_BTD
        sums = []
        for row in range(len(batch.tokens_BT)):
            read = self._model if hidden_BTD is None else _ReadRow(self._model, hidden_BTD[row : row + 1])
            loss = self._loss(read, _one_row(batch, row))
            sums.append(LOSS_SUMS.pack({"nll": loss.nll_sum, "correct": loss.num_correct}))
        return torch.stack(sums)


class _ReadRow:
    """A model that returns hidden states which it has computed before."""

    def __init__(self, model: Transformer, hidden_1TD: Tensor) -> None:
        self.head: Any = model.head
        self.embedding: Any = model.embedding
        self.generator: Any = None
        self.training = False
        self.vocab_size = model.vocab_size
        self._hidden_1TD = hidden_1TD

    def __call__(self, batch: Batch, *, logits: bool) -> ModelOutput:
        return ModelOutput(self._hidden_1TD)


def _one_row(batch: Batch, row: int) -> Batch:
    """Returns one row of a batch without its source, which has been read."""
    one: dict[str, Any] = {name: tensor[row : row + 1] for name, tensor in batch.along("B").items()}
    one |= move_places(batch, lambda row_P, column_P: torch.where(row_P == row, column_P, -1))
    if (pairs := batch.pairs) is not None:
        first = int((batch.targets_BT[:row] != IGNORE_INDEX).sum())
        end = first + int((batch.targets_BT[row] != IGNORE_INDEX).sum())
        own_P = (pairs.sides_P >= 2 * first) & (pairs.sides_P < 2 * end)
        cut = {name: tensor[own_P] for name, tensor in pairs.along("P").items()}
        cut |= {name: tensor[first:end] for name, tensor in pairs.along("A").items()}
        pairs = replace(pairs, **cut | {"sides_P": cut["sides_P"] - 2 * first})
    return replace(batch, **one, source=None, pairs=pairs, on_host=None)


@dataclass(frozen=True, slots=True)
class RowSums:
    """Sums of each row, float64 [rows]: -log p(target), right answers, and targets."""

    nll: np.ndarray
    correct: np.ndarray
    counts: np.ndarray

    @property
    def report(self) -> LossReport:
        """The mean over all targets."""
        count = self.counts.sum()
        loss = float(self.nll.sum() / max(count, 1.0))
        return LossReport(loss, int(count), int(self.correct.sum()))

    @property
    def exact(self) -> np.ndarray:
        """Rows whose targets all have the largest scores, float64 of 0 and 1.

        Such a row is what greedy decoding writes, token by token, and no other is.
        """
        return (self.correct == self.counts).astype(np.float64)

    def __add__(self, other: "RowSums") -> "RowSums":
        pairs = ((self.nll, other.nll), (self.correct, other.correct), (self.counts, other.counts))
        return RowSums(*(np.concatenate(pair) for pair in pairs))


def sum_rows(engine: ModelLoss, batches: Iterable[Batch]) -> RowSums:
    """Returns the sums of all rows with targets, in the order of one rank. Collective."""
    sums_of_rows = []
    for batch in batches:
        counts = (batch.targets_BT != IGNORE_INDEX).sum(dim=1).tolist()
        sums = engine.evaluate_rows(batch.to(engine.device)).tolist()
        sums_of_rows.append([[*row, count] for row, count in zip(sums, counts, strict=True) if count])
    rows = [row for batch in gather_batches(sums_of_rows) for row in batch]
    columns = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return RowSums(columns[:, 0], columns[:, 1], columns[:, 2])


def compare_exact(baseline: RowSums, model: RowSums, resamples: int) -> Difference:
    """Returns the difference in the share of rows that are right as a whole.

    Raises: DataError: Too few rows.
    """
    each = np.ones_like(model.counts)
    return compare_means(baseline.exact, model.exact, each, resamples, "captions")


def compare_rows(baseline: RowSums, model: RowSums, resamples: int, unit: str = "rows") -> dict[str, Difference]:
    """Returns the differences in mean loss and share of right answers. Raises: DataError: Too few rows.

    Rows are drawn, the same for both, not tokens: the tokens of a text are not independent.
    """
    assert np.array_equal(baseline.counts, model.counts), "both read the same rows"
    sums = {"loss": (baseline.nll, model.nll), "accuracy": (baseline.correct, model.correct)}
    return {name: compare_means(*pair, model.counts, resamples, unit) for name, pair in sums.items()}
