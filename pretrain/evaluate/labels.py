"""What an encoder with a head over labels says of documents or words: one pass over the data, for losses and scores.

batch -> hidden states -> head at the places that have a label -> gold, predicted, -log p(gold), document -> all ranks'
"""

import re
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from pretrain.artifact.find import is_release
from pretrain.artifact.what import What
from pretrain.errors import ConfigError, DataError
from pretrain.evaluate.label_scores import Answers
from pretrain.evaluate.ranks import gather_batches
from pretrain.evaluate.row_loss import RowSums
from pretrain.interop.labels import TEXTS, WORDS, labelled_by
from pretrain.model import LanguageModel
from pretrain.shards.index import DataIndex
from pretrain.types import IGNORE_INDEX, Batch

_NUMBERED = re.compile(r"LABEL_\d+")


def check_labels(what: What, index: DataIndex, where: str) -> None:
    """Refuses labelled data that a classifier cannot be measured on.

    Args:
        what: With a head over labels.
        index: Of the data.
        where: Their folder.

    Raises:
        ConfigError: The model labels texts and the data words, or the other way round.
        DataError: The labels are not the model's, in its order.
    """
    head, kind = what.config.head, TEXTS if index.kind == "classes" else WORDS
    made_for = labelled_by(what.path) if is_release(what.path) else None
    if made_for is None and (head.mean or getattr(what.config, "pooler", False)):
        made_for = TEXTS
    if made_for not in (None, kind):
        names = {TEXTS: ("texts", "words"), WORDS: ("words", "texts")}[made_for]
        raise ConfigError(
            f"the model labels {names[0]}, and in the data {names[1]} are labelled ({where})",
            where=str(what.path),
            fix=f"give data of kind {'classes' if made_for == TEXTS else 'tags'}",
        )
    if head.labels != list(index.labels):
        fix = "prepare the data with the labels of the model, in its order"
        if is_release(what.path) and all(map(_NUMBERED.fullmatch, head.labels)):
            fix += "; or name them in id2label of its config.json"
        elif sorted(head.labels) == sorted(index.labels):
            fix += f": labels=[{', '.join(head.labels)}]"
        raise DataError(
            f"its labels are {', '.join(index.labels)}, those of {what.path} {', '.join(head.labels)}",
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
    places_P = (targets != IGNORE_INDEX).nonzero()[:, 0]
    gold_P = targets[places_P]
    hidden_PD = model(batch, logits=False).hidden_BTD.flatten(0, 1)[places_P]
    assert model.head is not None
    logits_PV = model.head(hidden_PD).float()
    nll_P = -logits_PV.log_softmax(dim=-1).gather(1, gold_P[:, None])[:, 0]
    columns = (gold_P, logits_PV.argmax(dim=-1), nll_P, _number_documents(batch, places_P))
    return [list(row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _number_documents(batch: Batch, places_P: Tensor) -> Tensor:
    """Returns the document of each place, from 0 on, ascending; those without a label are not counted."""
    length = batch.targets_BT.shape[1]
    key_P = places_P // length * (length + 1)
    if batch.documents_BT is not None:
        key_P = key_P + batch.documents_BT.flatten()[places_P]
    return torch.unique(key_P, return_inverse=True)[1]


def sum_documents(answers: Answers) -> RowSums:
    """Returns losses and right answers of each document."""
    right = (answers.gold == answers.predicted).astype(float)
    nll, correct, counts = (
        np.bincount(answers.document, weights=weights, minlength=answers.num_documents).astype(float)
        for weights in (answers.nll, right, np.ones(len(right)))
    )
    return RowSums(nll, correct, counts)
