"""What an encoder with a head over labels says of documents or words: one pass over the data, for losses and scores.

batch -> hidden states -> head at the places that have a label -> gold, predicted, -log p(gold), document -> all ranks'
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from pretrain.evaluate.label_scores import Answers
from pretrain.evaluate.ranks import gather_batches
from pretrain.evaluate.row_loss import RowSums
from pretrain.model import LanguageModel
from pretrain.types import IGNORE_INDEX, Batch


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
