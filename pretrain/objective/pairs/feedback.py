"""Preferences without pairs (KTO, Ethayarajh et al. 2024, 4.1): records, wanted or not.

    row of the data   prompt 1, answer 1 | prompt 2, answer 2 | ...
    row of the model  prompt 1, answer 1 | prompt 1, answer 2 | prompt 2, answer 2 | ...

A record is a pair with the answer of the next one of its row, the last with the first's: rows, keys
and the reference are those of pairs (`preferences.py`). The second answer tells how far the model
is from the reference on answers that do not belong to the prompt:

    r = log p(answer) - log p_ref(answer)
    z = max(0, mean of r over the second answers of a row), without gradient
    loss of a record = w (1 - sigmoid(beta (r - z))), wanted
                       u (1 - sigmoid(beta (z - r))), not wanted

The row takes the place of the paper's batch, so that a loss depends on no micro-batch and no rank.
A record that is alone in its row has z = 0.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from pretrain.kinds.objectives.dpo import KtoConfig
from pretrain.objective.loss import LossOutput, Model
from pretrain.objective.pairs.preference_formulas import PairLosses
from pretrain.objective.pairs.preferences import preference_rows, sum_pairs
from pretrain.objective.row_maker import RowContext
from pretrain.objective.token_kinds import TokenKind
from pretrain.rows import TokenRows, Vocabulary
from pretrain.types import Batch, ModelRows, RowMaker


def build_feedback(section: KtoConfig, context: RowContext) -> RowMaker:
    """Records of a row, each with the answer of the next."""
    return partial(feedback_rows, fill=context.vocabulary.eos)


def feedback_rows(rows: TokenRows, fill: int) -> ModelRows:
    """Makes rows of pairs of records and answers of their neighbours; `fill` is padding."""
    assert rows.labels_BT is not None and rows.loss_mask_BT is not None, "records that are judged"
    num_rows, width = rows.tokens_BT.shape
    width = 2 * width - 1
    tokens = np.full((num_rows, width), fill, rows.tokens_BT.dtype)
    mask = np.zeros(tokens.shape, bool)
    starts, lengths, wanted, rows_of_records = [], [], [], []
    for row in range(num_rows):
        records = list(_records(rows, row))
        at = row * width
        for number, record in enumerate(records):
            wanted.append(bool(rows.labels_BT[row, record[0]]))
            rows_of_records.append(row)
            other = records[(number + 1) % len(records)]
            beside = np.append(_prompt(rows, row, record), _answer(rows, row, other))
            for places in (record, beside):
                starts.append(at)
                piece = slice(at, at + len(places))
                tokens.ravel()[piece] = rows.tokens_BT[row, places]
                if places is record or len(records) > 1:
                    mask.ravel()[piece] = rows.loss_mask_BT[row, places]
                at = piece.stop
        lengths.append(at - row * width)
        if lengths[-1] < width - 1:
            starts.append(at)
    paired = TokenRows(tokens, rows.sample_ids_B, np.array(starts), np.array(lengths), mask)
    made = preference_rows(paired)
    assert made.pairs is not None, "rows of pairs"
    arrays = {"wanted_A": np.array(wanted, bool), "rows_A": np.array(rows_of_records, np.int64)}
    return replace(made, pairs=replace(made.pairs, **arrays))


def _records(rows: TokenRows, row: int) -> Iterator[np.ndarray]:
    """Yields the columns of each record of a row."""
    assert rows.num_tokens_B is not None, "rows are padded"
    num_tokens = int(rows.num_tokens_B[row])
    columns = rows.starts - row * rows.tokens_BT.shape[1]
    starts = columns[(columns >= 0) & (columns < num_tokens)].tolist()
    for start, end in pairwise((*starts, num_tokens)):
        yield np.arange(start, end)


def _prompt(rows: TokenRows, row: int, record: np.ndarray) -> np.ndarray:
    """Returns the columns before the first one with a loss."""
    assert rows.loss_mask_BT is not None
    return record[: int(np.argmax(rows.loss_mask_BT[row, record]))]


def _answer(rows: TokenRows, row: int, record: np.ndarray) -> np.ndarray:
    """Returns the columns from the first one with a loss."""
    return record[len(_prompt(rows, row, record)) :]


def sum_feedback_loss(
    model: Model, batch: Batch, beta: float, desirable_weight: float, undesirable_weight: float
) -> LossOutput:
    """Sums the losses of the records of a batch; shows rewards and log-probabilities of both kinds."""
    pairs = batch.pairs
    assert pairs is not None
    wanted_A = pairs.wanted_A
    rows_A = pairs.rows_A
    assert wanted_A is not None and rows_A is not None, "rows of records"
    weights_A = torch.where(wanted_A, desirable_weight, undesirable_weight).double()
    formula = partial(feedback_loss, wanted_A=wanted_A, rows_A=rows_A, weights_A=weights_A, beta=beta)

    def show(scores_A2: Tensor, sums_A2: Tensor) -> list[Tensor]:
        kinds = (wanted_A.double(), (~wanted_A).double())
        rewards = [beta * kind @ scores_A2[:, 0] for kind in kinds]
        log_probs = [kind @ sums_A2[:, 0] for kind in kinds]
        return [
            *rewards,
            *log_probs,
            *(kind.sum() for kind in kinds),
            _divergence(scores_A2, rows_A).sum(),
        ]

    return sum_pairs(model, batch, formula, show)


def feedback_loss(scores_A2: Tensor, wanted_A: Tensor, rows_A: Tensor, weights_A: Tensor, beta: float) -> PairLosses:
    """Returns the losses of records, which are right on their side of the divergence of the row."""
    margin_A = beta * (scores_A2[:, 0] - _divergence(scores_A2, rows_A))
    margin_A = torch.where(wanted_A, margin_A, -margin_A)
    loss_A = weights_A * torch.sigmoid(-margin_A)
    return PairLosses(loss_A, loss_A, margin_A)


def _divergence(scores_A2: Tensor, rows_A: Tensor) -> Tensor:
    """Returns the estimate z of the row of each record, float64 [A], without gradient."""
    others_A = scores_A2[:, 1].detach()
    is_same_AA = (rows_A[:, None] == rows_A).double()
    return (is_same_AA @ others_A / is_same_AA.sum(dim=1)).clamp(min=0)


def feedback_kinds(rows: ModelRows, section: KtoConfig, vocabulary: Vocabulary) -> list[TokenKind]:
    """Returns the kinds of the tokens of a row, for `pretrain data show`."""
    pairs = rows.pairs
    assert pairs is not None and pairs.wanted_A is not None and rows.target_positions_P is not None
    kinds = [TokenKind.CONTEXT] * rows.tokens_BT.shape[1]
    for place, side in zip(rows.target_positions_P, pairs.sides_P, strict=True):
        if side % 2 == 0:
            kinds[place + 1] = TokenKind.CHOSEN if pairs.wanted_A[side // 2] else TokenKind.REJECTED
    return kinds
