"""Scores of a classifier of documents or words: accuracy, macro F1, Matthews, a table of classes.

    gold and predicted labels -> confusion matrix -> scores; documents drawn again -> their intervals, and differences

Figures are those of scikit-learn: a class that occurs neither in the data nor in the answers has no part in macro F1,
one without a right answer has F1 of 0, and Matthews' coefficient (for several classes, Gorodkin 2004) is 0 where all
answers are one class.
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
from pretrain.evaluate.bootstrap import (
    MIN_UNITS,
    Difference,
    Interval,
    bootstrap_interval,
    draw,
    judge,
    wilson_interval,
)
from pretrain.evaluate.distributed import gather_batches
from pretrain.evaluate.row_loss import RowSums
from pretrain.interop.label_names import TEXTS, WORDS, labelled_by
from pretrain.model import LanguageModel
from pretrain.shards.index import DataIndex
from pretrain.types import IGNORE_INDEX, Batch

SCORES = ("accuracy", "macro_f1", "matthews")

_LOWEST = {"accuracy": 0.0, "macro_f1": 0.0, "matthews": -1.0}


@dataclass(frozen=True, slots=True)
class Answers:
    """What a model said of each labelled document or word.

    Attributes:
        gold: int64 [P]: numbers of the labels.
        predicted: int64 [P]: numbers of the labels with the largest score.
        document: int64 [P]: which document each is of, from 0, ascending.
        nll: float64 [P]: -log p(gold).
    """

    gold: np.ndarray
    predicted: np.ndarray
    document: np.ndarray
    nll: np.ndarray

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
    """One class.

    Attributes:
        name: Label of the class.
        precision: Share of the answers that are right, among those that name it; 0 where none does.
        recall: Share of its cases that are found; 0 where it has none.
        f1: Harmonic mean of both.
        support: Number of cases.
    """

    name: str
    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True, slots=True)
class LabelScores:
    """Scores of a classifier.

    Attributes:
        scores: By name of `SCORES`.
        classes: In the order of the labels.
        confusion: int64 [L, L]: rows are gold labels, columns answers.
        num_documents: With a label.
    """

    scores: dict[str, Interval]
    classes: list[ClassScores]
    confusion: np.ndarray
    num_documents: int

    def facts(self) -> dict[str, Any]:
        """Returns plain values."""
        return {
            **{name: asdict(score) for name, score in self.scores.items()},
            "classes": {one.name: {k: v for k, v in asdict(one).items() if k != "name"} for one in self.classes},
            "confusion": self.confusion.tolist(),
            "documents": self.num_documents,
        }

    def lines(self) -> list[str]:
        """Returns what is printed."""
        lines = [
            f"{name:<10} {score.value:.4f}  95% {score.low:.4f} to {score.high:.4f} ({score.method})"
            for name, score in self.scores.items()
        ]
        width = max([5, *(len(one.name) for one in self.classes)])
        lines.append(f"{'class':<{width}}  precision  recall      f1  support")
        return lines + [
            f"{one.name:<{width}}  {one.precision:9.4f}  {one.recall:6.4f}  {one.f1:6.4f}  {one.support:7,}"
            for one in self.classes
        ]


def score_labels(answers: Answers, names: Sequence[str], resamples: int) -> LabelScores:
    """Scores a model's answers.

    Accuracy has Wilson's interval where each document has one label; the words of a document are not independent, and
    documents are drawn for it, as for the other scores.

    Args:
        answers: At least one.
        names: Names of the labels.
        resamples: Draws of documents. With too few documents to draw from, intervals are the whole range.
    """
    confusion = count_pairs(answers, len(names))
    values = _scores(confusion[None].astype(float))[:, 0]
    intervals = _intervals(answers, values, len(names), resamples)
    if answers.num_documents == len(answers.gold):
        right = int(np.trace(confusion))
        intervals["accuracy"] = wilson_interval(right, len(answers.gold))
    precision, recall, f1 = _class_scores(confusion[None].astype(float))
    classes = [
        ClassScores(name, float(precision[0, number]), float(recall[0, number]), float(f1[0, number]), int(support))
        for number, (name, support) in enumerate(zip(names, confusion.sum(axis=1), strict=True))
    ]
    return LabelScores(intervals, classes, confusion, answers.num_documents)


def _intervals(answers: Answers, values: np.ndarray, num_labels: int, resamples: int) -> dict[str, Interval]:
    if answers.num_documents < MIN_UNITS:
        return {name: Interval(float(values[row]), _LOWEST[name], 1.0, "too few") for row, name in enumerate(SCORES)}
    draws = np.concatenate([_scores(drawn) for drawn in _drawn(answers, num_labels, resamples)], axis=1)
    return {name: bootstrap_interval(float(values[row]), draws[row]) for row, name in enumerate(SCORES)}


def compare_labels(baseline: Answers, model: Answers, num_labels: int, resamples: int) -> dict[str, Difference]:
    """Returns the difference in each score, documents drawn alike for both. Raises: DataError: Too few documents."""
    assert np.array_equal(baseline.gold, model.gold) and np.array_equal(baseline.document, model.document)
    pairs = [
        (_scores(mine), _scores(its))
        for mine, its in zip(_drawn(model, num_labels, resamples), _drawn(baseline, num_labels, resamples), strict=True)
    ]
    draws = np.concatenate([mine - its for mine, its in pairs], axis=1)
    mine, its = (_scores(count_pairs(one, num_labels)[None].astype(float))[:, 0] for one in (model, baseline))
    count = model.num_documents
    return {name: judge(float(mine[row] - its[row]), draws[row], count, "documents") for row, name in enumerate(SCORES)}


def count_pairs(answers: Answers, num_labels: int) -> np.ndarray:
    """Returns how often each label was answered for each, int64 [L, L]: rows are gold."""
    pair = answers.gold * num_labels + answers.predicted
    return np.bincount(pair, minlength=num_labels**2).reshape(num_labels, num_labels)


def _drawn(answers: Answers, num_labels: int, resamples: int) -> Iterator[np.ndarray]:
    """Yields the confusion matrix of each draw of documents, float64 [draws, L, L], some draws at a time."""
    pair, cells = answers.gold * num_labels + answers.predicted, num_labels**2
    for drawn in draw(answers.num_documents, resamples):
        counts = [np.bincount(pair, weights=weights[answers.document], minlength=cells) for weights in drawn]
        yield np.stack(counts).reshape(-1, num_labels, num_labels)


def _class_scores(confusion: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns precision, recall and F1 of each class, float64 [N, L], of N confusion matrices."""
    right = confusion.diagonal(axis1=1, axis2=2)
    support, answered = confusion.sum(axis=2), confusion.sum(axis=1)
    with np.errstate(invalid="ignore"):
        precision, recall, f1 = right / answered, right / support, 2 * right / (support + answered)
    return np.nan_to_num(precision), np.nan_to_num(recall), np.nan_to_num(f1)


def _scores(confusion: np.ndarray) -> np.ndarray:
    """Returns `SCORES` of N confusion matrices, float64 [3, N]."""
    support, answered = confusion.sum(axis=2), confusion.sum(axis=1)
    total, right = support.sum(axis=1), confusion.trace(axis1=1, axis2=2)
    occurs = (support + answered) > 0
    macro_f1 = (_class_scores(confusion)[2] * occurs).sum(axis=1) / occurs.sum(axis=1)
    covariance = right * total - (support * answered).sum(axis=1)
    spread = (total**2 - (support**2).sum(axis=1)) * (total**2 - (answered**2).sum(axis=1))
    matthews = np.where(spread > 0, covariance / np.sqrt(np.maximum(spread, 1e-300)), 0.0)
    return np.stack((right / total, macro_f1, matthews))


# What an encoder with a head over labels says of documents or words: one pass over the data, for
# losses and scores.
#
# batch -> hidden states -> head at the places that have a label -> gold, predicted, -log p(gold),
# document -> all ranks'


_NUMBERED = re.compile(r"LABEL_\d+")


def check_labels(source: ModelSource, index: DataIndex, where: str) -> None:
    """Refuses labelled data that a classifier cannot be measured on.

    Args:
        source: With a head over labels.
        index: Index of the data.
        where: Their folder.

    Raises:
        ConfigError: The model labels texts and the data words, or the other way round.
        DataError: The labels are not the model's, in its order.
    """
    head, kind = source.config.head, TEXTS if index.kind == "classes" else WORDS
    made_for = labelled_by(source.path) if is_release(source.path) else None
    if made_for is None and (head.mean or getattr(source.config, "pooler", False)):
        made_for = TEXTS
    if made_for not in (None, kind):
        names = {TEXTS: ("texts", "words"), WORDS: ("words", "texts")}[made_for]
        raise ConfigError(
            f"the model labels {names[0]}, and in the data {names[1]} are labelled ({where})",
            where=str(source.path),
            fix=f"give data of kind {'classes' if made_for == TEXTS else 'tags'}",
        )
    if head.labels != list(index.labels):
        fix = "prepare the data with the labels of the model, in its order"
        if is_release(source.path) and all(map(_NUMBERED.fullmatch, head.labels)):
            fix += "; or name them in id2label of its config.json"
        elif sorted(head.labels) == sorted(index.labels):
            fix += f": labels=[{', '.join(head.labels)}]"
        raise DataError(
            f"its labels are {', '.join(index.labels)}, those of {source.path} {', '.join(head.labels)}",
            where=where,
            fix=fix,
        )


def read_answers(model: LanguageModel, batches: Iterable[Batch]) -> Answers:
    """Runs every batch. Collective: the answers of all ranks, in the order of one.

    Args:
        model: With a head over labels, in eval mode.
        batches: This rank's; every rank has as many.
    """
    device = next(model.parameters()).device
    found = [_answer(model, batch.to(device)) for batch in batches]
    rows, first = [], 0
    for batch in gather_batches(found):
        rows += [(*answer, first + document) for *answer, document in batch]
        first = rows[-1][-1] + 1 if rows else 0
    columns = np.array(rows, dtype=np.float64).reshape(-1, 4)
    gold, predicted, document = (columns[:, column].astype(np.int64) for column in (0, 1, 3))
    return Answers(gold, predicted, document, columns[:, 2])


@torch.no_grad()
def _answer(model: LanguageModel, batch: Batch) -> list[list[float]]:
    """Returns gold label, answer, -log p(gold) and document, numbered within the batch, of each place with a label."""
    targets = batch.targets_BT.flatten()
    target_positions_P = (targets != IGNORE_INDEX).nonzero()[:, 0]
    gold_P = targets[target_positions_P]
    hidden_PD = model(batch, logits=False).hidden_BTD.flatten(0, 1)[target_positions_P]
    assert model.head is not None
    logits_PV = model.head(hidden_PD).float()
    nll_P = -logits_PV.log_softmax(dim=-1).gather(1, gold_P[:, None])[:, 0]
    columns = (gold_P, logits_PV.argmax(dim=-1), nll_P, _number_documents(batch, target_positions_P))
    return [list(row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _number_documents(batch: Batch, target_positions_P: Tensor) -> Tensor:
    """Returns the document of each place, from 0 on, ascending; those without a label are not counted."""
    length = batch.targets_BT.shape[1]
    key_P = target_positions_P // length * (length + 1)
    if batch.documents_BT is not None:
        key_P = key_P + batch.documents_BT.flatten()[target_positions_P]
    return torch.unique(key_P, return_inverse=True)[1]


def sum_documents(answers: Answers) -> RowSums:
    """Returns losses and right answers of each document."""
    right = (answers.gold == answers.predicted).astype(float)
    nll, correct, counts = (
        np.bincount(answers.document, weights=weights, minlength=answers.num_documents).astype(float)
        for weights in (answers.nll, right, np.ones(len(right)))
    )
    return RowSums(nll, correct, counts)
