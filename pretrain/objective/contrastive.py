"""Contrastive learning: the vector of a query near its positive's, away from all others.

    row     query | positive | hard negatives ... | query | ...     documents, a record together
    loss    mean over the records of the global batch of `info_nce`; a target is a record

The loss of a record needs the vectors of all micro-batches of all ranks. Gradients are cached (Gao
et al. 2021, 3.2), so that memory is that of one micro-batch, and the result that of one process
with all of them:

    rehearsal     each micro-batch, without gradients --> vectors
    comparison    vectors of all ranks --> loss of a rank's records, gradients by all vectors, summed
    second pass   each micro-batch again, with the same dropout --> sum of gradient . vector

A batch by itself, in an evaluation or of one process without accumulation, is compared within its
loss.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain import dist
from pretrain.kinds.layouts.triples import IS_POSITIVE, IS_QUERY, TEXT_BEGINS, group_of
from pretrain.kinds.objectives.contrastive import ContrastiveConfig
from pretrain.objective.info_nce import InfoNce
from pretrain.objective.loss import LossOutput, Model
from pretrain.objective.loss_sums import EVALUATED_SUMS
from pretrain.objective.row_maker import RowContext, count_padding, place_documents
from pretrain.objective.token_kinds import TokenKind
from pretrain.rows import IGNORE_INDEX, TokenRows, Vocabulary
from pretrain.types import Batch, ModelRows, RowMaker, TextBatch


def build_contrastive(section: ContrastiveConfig, context: RowContext) -> RowMaker:
    """Records of texts, one or several a row."""
    return contrastive_rows


def contrastive_rows(rows: TokenRows) -> ModelRows:
    """Makes rows of texts to compare: a target at the first token of each query."""
    assert rows.labels_BT is not None and rows.num_tokens_B is not None, "marked and padded"
    width = rows.tokens_BT.shape[1]
    marks = np.where(rows.labels_BT == IGNORE_INDEX, 0, rows.labels_BT).astype(np.int64).ravel()
    starts = np.flatnonzero(marks & TEXT_BEGINS)
    first = marks[starts]
    row, column = np.divmod(starts, width)
    ends = np.minimum(np.append(starts[1:], marks.size), row * width + rows.num_tokens_B[row])
    roles = np.where(first & IS_QUERY, 0, np.where(first & IS_POSITIVE, 1, 2))
    is_query = roles == 0
    groups = np.where(is_query, group_of(first, marks[np.minimum(starts + 1, marks.size - 1)]), 0)
    record = np.cumsum(is_query) - 1
    inputs = rows.tokens_BT[:, :-1].astype(np.int64)
    targets = np.full(inputs.shape, IGNORE_INDEX, dtype=np.int64)
    targets[row[is_query], column[is_query]] = 0
    positions, documents = place_documents(rows, document_mask=True)
    return Batch(
        inputs,
        targets,
        **rows.carried(),
        positions_BT=positions,
        documents_BT=documents,
        target_positions_P=row * (width - 1) + column,
        texts=TextBatch(roles, _hash_texts(rows.tokens_BT, starts, ends), groups[is_query][record]),
        num_padding=count_padding(rows, inputs.shape[1]),
    )


def _hash_texts(tokens_BT: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns a hash of the tokens of each text, int64."""
    tokens = tokens_BT.astype("<u4").ravel()
    keys = np.empty(len(starts), dtype=np.int64)
    for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        digest = hashlib.blake2b(tokens[start:end].tobytes(), digest_size=8).digest()
        keys[number] = int.from_bytes(digest, "little", signed=True)
    return keys


def compare_batches(
    batches: Sequence[Batch],
    outputs: Sequence[Tensor],
    rank: int,
    **settings: Any,
) -> list[Batch]:
    """Returns the micro-batches of a rank with their loss over all ranks' texts. Collective.

    Args:
        batches: The micro-batches, on any device.
        outputs: Sums of the rehearsal of each, whose end `_rehearsed` made.
        rank: Number of this rank.
        settings: Those of the loss.
    """
    numbers = [output[len(EVALUATED_SUMS) :] for output in outputs]
    log_scale, width = numbers[0][:1], int(numbers[0][1])
    vectors_PD = torch.cat([one[2:].view(-1, width) for one in numbers])
    parts = [batch.texts for batch in batches]
    device = vectors_PD.device
    mine = TextBatch(*(_join(parts, name).to(device) for name in ("roles_P", "keys_P", "groups_P")))
    num_texts, num_records = zip(*dist.gather_objects(_count(mine)), strict=True)
    first = sum(num_texts[:rank])
    last = first + num_texts[rank]
    records = sum(num_records[:rank]), sum(num_records[: rank + 1])

    def gather(values: Tensor) -> Tensor:
        whole = values.new_zeros(sum(num_texts), *values.shape[1:])
        whole[first:last] = values
        return dist.all_reduce_sum(whole)

    texts = TextBatch(gather(mine.roles_P), gather(mine.keys_P), gather(mine.groups_P))
    slopes_PD, results_AR = InfoNce(**settings)(gather(vectors_PD), texts, log_scale, *records)
    slopes_PD = dist.all_reduce_sum(slopes_PD)[first:last]
    compared = []
    for batch in batches:
        texts = _texts(batch)
        size, records_of_batch = _count(texts)
        texts = replace(texts, slopes_PD=slopes_PD[:size], results_AR=results_AR[:records_of_batch])
        slopes_PD = slopes_PD[size:]
        results_AR = results_AR[records_of_batch:]
        compared.append(replace(batch, texts=texts))
    return compared


def _count(texts: TextBatch) -> tuple[int, int]:
    """Returns the number of texts, and of records."""
    return len(texts.roles_P), int((texts.roles_P == 0).sum())


def _texts(batch: Batch) -> TextBatch:
    assert batch.texts is not None, "rows of texts to compare"
    return batch.texts


def _join(parts: Sequence[TextBatch | None], name: str) -> Tensor:
    return torch.cat([getattr(part, name) for part in parts])


def sum_contrastive_loss(model: Model, batch: Batch, **settings: Any) -> LossOutput:
    """Sums the losses of the records of a batch, over its own texts where others are unknown.

    In a rehearsal nothing is minimised, and shown are the vectors, for `compare_batches`.
    """
    texts = _texts(batch)
    assert batch.target_positions_P is not None, "rows of texts"
    output = model(batch, logits=False)
    hidden_PD = output.hidden_BTD.flatten(0, 1).index_select(0, batch.target_positions_P)

    def head_loss(vectors_PD: Tensor, log_scale: Tensor | None) -> LossOutput:
        exact_PD = vectors_PD.to(torch.promote_types(vectors_PD.dtype, torch.float32))
        known_PD = vectors_PD.detach().double()
        known_scale = known_PD.new_zeros(1) if log_scale is None else log_scale.detach().double()
        slopes_PD = texts.slopes_PD
        results_AR = texts.results_AR
        if slopes_PD is None or results_AR is None:
            if model.training and not torch.is_grad_enabled():
                return _rehearsed(known_PD, known_scale)
            slopes_PD, results_AR = InfoNce(**settings)(known_PD, texts, known_scale)
        loss_A, correct_A, similarity_A, slope_A = results_AR.unbind(dim=1)
        nll_sum = loss_A.sum()
        linear = (exact_PD * slopes_PD.to(exact_PD.dtype)).sum()
        if log_scale is not None:
            linear = linear + (log_scale * slope_A.sum().to(exact_PD.dtype)).sum()
        # The value of the loss, with the gradient of what is linear in the vectors.
        loss_sum = linear + (nll_sum.to(linear.dtype) - linear.detach())
        nll_P = loss_A.new_zeros(len(texts.roles_P))
        nll_P[texts.roles_P == 0] = loss_A
        temperature = InfoNce(**settings).temperature * (-known_scale).exp() * len(loss_A)
        shown_M = torch.cat((similarity_A.sum()[None], temperature))
        return LossOutput(loss_sum, nll_sum, correct_A.sum().long(), nll_P, shown_M=shown_M)

    # The hooks of ZeRO stage 3 may return a plain tuple.
    return LossOutput(*model.head(hidden_PD, head_loss))._replace(routing_LW=output.routing_LW)


def _rehearsed(vectors_PD: Tensor, log_scale: Tensor) -> LossOutput:
    """Returns the number of the temperature, the width, and the vectors; float64."""
    width = vectors_PD.new_full((1,), vectors_PD.shape[1])
    nothing = vectors_PD.new_zeros(())
    shown_M = torch.cat((log_scale, width, vectors_PD.flatten()))
    return LossOutput(nothing, nothing, nothing, shown_M=shown_M)


def compared_kinds(rows: ModelRows, section: Any, vocabulary: Vocabulary) -> list[TokenKind]:
    """Returns the kinds of the tokens of a row of texts, for `pretrain data show`."""
    texts = rows.texts
    starts = rows.target_positions_P
    assert texts is not None and starts is not None, "rows of texts to compare"
    kinds = [TokenKind.CONTEXT] * rows.tokens_BT.shape[1]
    ends = [*starts[1:].tolist(), rows.num_tokens()]
    for role, start, end in zip(texts.roles_P.tolist(), starts.tolist(), ends, strict=True):
        kind = (TokenKind.QUERY, TokenKind.CHOSEN, TokenKind.REJECTED)[role]
        kinds[start:end] = [kind] * (end - start)
    return kinds
