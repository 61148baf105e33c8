"""Scores of a classifier of documents or words: accuracy, macro F1, Matthews, a table of classes.

    batch -> hidden states -> head at the labelled places -> Answers of all ranks
    gold and predicted labels -> confusion matrix -> scores
    documents drawn again     -> confusion matrices -> intervals, differences

Figures are those of scikit-learn: a class without cases and answers has no part in macro F1, one
without a right answer has an F1 of 0, and Matthews' coefficient (for several classes, Gorodkin
2004) is 0 where all answers are one class.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.artifact.model_path import is_release
from pretrain.artifact.source import ModelSource
from pretrain.errors import ConfigError, DataError
from pretrain.evaluation.bootstrap import (
    MIN_UNITS,
    Difference,
    Interval,
    bootstrap_interval,
    draw,
    judge,
    wilson_interval,
)
from pretrain.evaluation.distributed import gather_batches
from pretrain.evaluation.row_loss import RowSums
from pretrain.families.label_names import TEXTS, WORDS
from pretrain.model import LanguageModel
from pretrain.shards.index import DataIndex
from pretrain.types import IGNORE_INDEX, Batch

SCORES = ("accuracy", "macro_f1", "matthews")
_LOWEST = (0.0, 0.0, -1.0)
_NUMBERED = re.compile(r"LABEL_\d+")


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of a model for labelled documents or words, arrays [P]."""

    gold: np.ndarray  # int64 numbers of the labels
    predicted: np.ndarray  # int64 numbers of the labels with the largest score
    document: np.ndarray  # int64, from 0, ascending
    nll: np.ndarray  # float64, -log p(gold)

    @property
    def num_documents(self) -> int:
        """Documents with a label."""
        return int(self.document[-1]) + 1 if len(self.document) else 0

    def __add__(self, other: "Answers") -> "Answers":
        return Answers(
            np.concatenate((self.gold, other.gold)),
            np.concatenate((self.predicted, other.predicted)),
            np.concatenate((self.document, other.document + self.num_documents)),
            np.concatenate((self.nll, other.nll)),
        )


@dataclass(frozen=True, slots=True)
class ClassScores:
    """Scores of one class, over its `support` cases; 0 where there are no cases or answers."""

    name: str
    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True, slots=True)
class LabelScores:
    """Scores of a classifier: intervals by name of `SCORES`, and scores by class.

    `confusion` is int64 [L, L]: rows are gold labels, columns answers.
    """

    scores: dict[str, Interval]
    classes: list[ClassScores]
    confusion: np.ndarray
    num_documents: int

    def facts(self) -> dict[str, Any]:
        """Returns plain values."""
        classes = {one.name: asdict(one) for one in self.classes}
        for values in classes.values():
            del values["name"]
        return {
            **{name: asdict(score) for name, score in self.scores.items()},
            "classes": classes,
            "confusion": self.confusion.tolist(),
            "documents": self.num_documents,
        }

    def lines(self) -> list[str]:
        """Returns the lines of the report."""
        lines = [
            f"{name:<10} {score.value:.4f}  95% {score.low:.4f} to {score.high:.4f} ({score.method})"
            for name, score in self.scores.items()
        ]
        width = max([5, *(len(one.name) for one in self.classes)])
        lines.append(f"{'class':<{width}}  precision  recall      f1  support")
        for one in self.classes:
            row = f"{one.precision:9.4f}  {one.recall:6.4f}  {one.f1:6.4f}  {one.support:7,}"
            lines.append(f"{one.name:<{width}}  {row}")
        return lines


def score_labels(answers: Answers, names: Sequence[str], resamples: int) -> LabelScores:
    """Scores a model's answers, at least one.

    Accuracy has Wilson's interval where each document has one label. The words of a document are
    not independent: then documents are drawn, as for the other scores. With too few documents,
    intervals are the whole range.
    """
    num_labels = len(names)
    num_documents = answers.num_documents
    confusion = _count(answers, num_labels)
    values = _scores(confusion[None])[:, 0].tolist()
    if num_documents < MIN_UNITS:
        parts = zip(SCORES, values, _LOWEST, strict=True)
        intervals = {name: Interval(value, low, 1.0, "too few") for name, value, low in parts}
    else:
        drawn_scores = [_scores(drawn) for drawn in _drawn(answers, num_labels, resamples)]
        draws = np.concatenate(drawn_scores, axis=1)
        scores = zip(SCORES, values, draws, strict=True)
        intervals = {name: bootstrap_interval(value, drawn) for name, value, drawn in scores}
    if num_documents == len(answers.gold):
        intervals["accuracy"] = wilson_interval(int(np.trace(confusion)), num_documents)
    columns = _class_scores(confusion[None])
    support = confusion.sum(axis=1)
    classes = []
    for number, name in enumerate(names):
        precision, recall, f1 = (float(column[0, number]) for column in columns)
        classes.append(ClassScores(name, precision, recall, f1, int(support[number])))
    return LabelScores(intervals, classes, confusion.astype(np.int64), num_documents)


def compare_labels(baseline: Answers, model: Answers, num_labels: int, resamples: int) -> dict[str, Difference]:
    """Returns the difference in each score, documents drawn alike for both. Raises: DataError."""
    same_gold = np.array_equal(baseline.gold, model.gold)
    assert same_gold and np.array_equal(baseline.document, model.document)
    mine = _drawn(model, num_labels, resamples)
    theirs = _drawn(baseline, num_labels, resamples)
    differences = [_scores(one) - _scores(other) for one, other in zip(mine, theirs, strict=True)]
    draws = np.concatenate(differences, axis=1)
    one, other = (_scores(_count(answers, num_labels)[None])[:, 0] for answers in (model, baseline))
    scores = zip(SCORES, (one - other).tolist(), draws, strict=True)
    count = model.num_documents
    return {name: judge(observed, drawn, count, "documents") for name, observed, drawn in scores}


def _count(answers: Answers, num_labels: int, weights: np.ndarray | None = None) -> np.ndarray:
    """Returns the confusion matrix, float64 [L, L], of documents with weights; rows are gold."""
    pair = answers.gold * num_labels + answers.predicted
    of_answers = None if weights is None else weights[answers.document]
    counts = np.bincount(pair, weights=of_answers, minlength=num_labels**2)
    return counts.astype(float).reshape(num_labels, num_labels)


def _drawn(answers: Answers, num_labels: int, resamples: int) -> Iterator[np.ndarray]:
    for drawn in draw(answers.num_documents, resamples):
        yield np.stack([_count(answers, num_labels, weights) for weights in drawn])


def _class_scores(confusion: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    right = confusion.diagonal(axis1=1, axis2=2)
    support = confusion.sum(axis=2)
    answered = confusion.sum(axis=1)
    with np.errstate(invalid="ignore"):
        precision, recall, f1 = right / answered, right / support, 2 * right / (support + answered)
    return np.nan_to_num(precision), np.nan_to_num(recall), np.nan_to_num(f1)


def _scores(confusion: np.ndarray) -> np.ndarray:
    support = confusion.sum(axis=2)
    answered = confusion.sum(axis=1)
    total = support.sum(axis=1)
    right = confusion.trace(axis1=1, axis2=2)
    occurs = (support + answered) > 0
    macro_f1 = (_class_scores(confusion)[2] * occurs).sum(axis=1) / occurs.sum(axis=1)
    covariance = right * total - (support * answered).sum(axis=1)
    spread = (total**2 - (support**2).sum(axis=1)) * (total**2 - (answered**2).sum(axis=1))
    matthews = np.where(spread > 0, covariance / np.sqrt(np.maximum(spread, 1e-300)), 0.0)
    return np.stack((right / total, macro_f1, matthews))


def check_labels(source: ModelSource, index: DataIndex, where: str) -> None:
    """Refuses labelled data, in the folder `where`, that a classifier cannot be measured on.

    Raises: ConfigError: Texts against words; DataError: The labels are not the model's, in its
    order.
    """
    head = source.config.head
    kind = WORDS if index.layout.labels_words else TEXTS
    made_for = next((unit for unit in (TEXTS, WORDS) if source.like.endswith(unit)), None)
    # Only texts have a pooler or a mean.
    if made_for is None and (head.mean or getattr(source.config, "pooler", False)):
        made_for = TEXTS
    if made_for not in (None, kind):
        ours, theirs = ("texts", "words") if made_for == TEXTS else ("words", "texts")
        raise ConfigError(
            f"the model labels {ours}, and in the data {theirs} are labelled ({where})",
            where=str(source.path),
            fix=f"give data of kind {'classes' if made_for == TEXTS else 'tags'}",
        )
    if head.labels != list(index.labels):
        fix = "prepare the data with the labels of the model, in its order"
        if is_release(source.path) and all(map(_NUMBERED.fullmatch, head.labels)):
            fix += "; or name them in id2label of its config.json"
        elif sorted(head.labels) == sorted(index.labels):
            fix += f": labels=[{', '.join(head.labels)}]"
        labels = f"its labels are {', '.join(index.labels)}"
        raise DataError(
            f"{labels}, those of {source.path} {', '.join(head.labels)}",
            where=where,
            fix=fix,
        )


def read_answers(model: LanguageModel, batches: Iterable[Batch]) -> Answers:
    """Returns the answers of a classifier in eval mode to the batches of all ranks. Collective."""
    device = next(model.parameters()).device
    answers = [_answer(model, batch.to(device)) for batch in batches]
    rows: list[tuple[float, ...]] = []
    first = 0
    for batch in gather_batches(answers):
        rows += [(*answer, first + document) for *answer, document in batch]
        first = int(rows[-1][-1]) + 1 if rows else 0
    columns = np.array(rows, dtype=np.float64).reshape(-1, 4)
    gold, predicted, document = (columns[:, column].astype(np.int64) for column in (0, 1, 3))
    return Answers(gold, predicted, document, columns[:, 2])


@torch.no_grad()
def _answer(model: LanguageModel, batch: Batch) -> list[list[float]]:
    """Returns gold label, answer, -log p(gold) and document in the batch, of each labelled place."""
    targets = batch.targets_BT.flatten()
    target_positions_P = (targets != IGNORE_INDEX).nonzero()[:, 0]
    gold_P = targets[target_positions_P]
    hidden_PD = model(batch, logits=False).hidden_BTD.flatten(0, 1)[target_positions_P]
    assert model.head is not None
    logits_PV = model.head(hidden_PD).float()
    nll_P = -logits_PV.log_softmax(dim=-1).gather(1, gold_P[:, None])[:, 0]
    # Documents by row and number in the row, ascending; those without a label are not counted.
    length = batch.targets_BT.shape[1]
    key_P = target_positions_P // length * (length + 1)
    if batch.documents_BT is not None:
        key_P = key_P + batch.documents_BT.flatten()[target_positions_P]
    document_P: Tensor = torch.unique(key_P, return_inverse=True)[1]
    columns = (gold_P, logits_PV.argmax(dim=-1), nll_P, document_P)
    return [list(row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def sum_documents(answers: Answers) -> RowSums:
    """Returns losses and right answers of each document."""
    right = (answers.gold == answers.predicted).astype(float)
    columns = (answers.nll, right, np.ones(len(right)))
    size = answers.num_documents
    sums = [np.bincount(answers.document, weights=one, minlength=size) for one in columns]
    return RowSums(*(column.astype(float) for column in sums))
