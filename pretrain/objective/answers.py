"""Answers in texts: the first and the last token of each, by an encoder (Devlin et al. 2019, 4.2).

    row     question, text | question, text | ...      documents, whole
    marks   of tokens  -->  places of the document's first token, and of the answer's first and last
    loss of an answer = mean of -log p(first) and -log p(last), a softmax each over its document

A text without the answer has it at the first token of the document ([CLS]). A target is an answer:
the loss is the mean over answers, however their documents are packed. Padding has no share in the
softmax, as transformers has it for rows of one length.

An answer is right where the best span is it: that of the highest sum of both scores, of all within
the text that do not end before they begin, unless the first token's sum is as high (SQuAD 2.0, as
Devlin et al. 2019 released it). Shown is the F1 of its tokens, by their places.
"""

import numpy as np
import torch
from torch import Tensor

from pretrain.config.objective import ObjectiveConfig, TaskConfig
from pretrain.objective.loss import Loss, LossOutput, Model
from pretrain.objective.row_maker import RowContext, count_padding, place_documents
from pretrain.rows import ANSWER_BEGINS, ANSWER_ENDS, IGNORE_INDEX, ModelRows, RowMaker, TokenRows
from pretrain.types import Batch

OVERLAP = ("f1",)
"""Sum that the loss shows: the F1 of the tokens of each best span with those of the answer."""


def build_answers(config: TaskConfig, context: RowContext) -> RowMaker:
    """Questions with their texts, one or several a row."""
    return answer_rows


def answer_rows(rows: TokenRows) -> ModelRows:
    """Makes rows of questions: a target at the first token of each document, and three places."""
    assert rows.labels is not None and rows.num_tokens is not None, "marked and padded"
    inputs = rows.tokens[:, :-1].astype(np.int64)
    marks = rows.labels[:, :-1].ravel()
    row, column = np.divmod(rows.starts, rows.tokens.shape[1])
    is_document = column < rows.num_tokens[row]  # the last start of a row is that of its padding
    first = row[is_document] * inputs.shape[1] + column[is_document]
    in_text = marks != IGNORE_INDEX
    bits = (ANSWER_BEGINS, ANSWER_ENDS)
    begins, ends = (np.flatnonzero(in_text & (marks & bit > 0)) for bit in bits)
    assert len(first) == len(begins) == len(ends), "a document has one answer"
    targets = np.full(inputs.size, IGNORE_INDEX, dtype=np.int64)
    targets[first] = 0
    in_text[first] = False
    positions, documents = place_documents(rows, document_mask=True)
    return ModelRows(
        inputs=inputs,
        targets=targets.reshape(inputs.shape),
        num_targets=len(first),
        sample_ids=rows.sample_ids,
        positions=positions,
        documents=documents,
        target_positions=np.stack((first, begins, ends), axis=1).ravel(),
        token_types=in_text.reshape(inputs.shape).astype(np.int64),
        num_padding=count_padding(rows, inputs.shape[1]),
    )


def answer_loss(config: ObjectiveConfig) -> Loss:
    """Returns the loss of a run, which has no settings."""
    return sum_answer_loss


def sum_answer_loss(model: Model, batch: Batch) -> LossOutput:
    """Sums the losses of the answers of a batch, and shows the sum of `OVERLAP`."""
    types_BT = batch.token_types_BT
    assert batch.target_positions_P is not None and types_BT is not None, "rows of answers"
    first_A, begin_A, end_A = batch.target_positions_P.view(-1, 3).unbind(dim=1)
    output = model(batch, logits=False)
    scores_BT2 = model.head(output.hidden_BTD)
    scores_BT2 = scores_BT2.to(torch.promote_types(scores_BT2.dtype, torch.float32))
    # The tokens of each document from its first one on; behind its last one what follows in memory.
    length = batch.tokens_BT.shape[1]
    places_AT = first_A[:, None] + torch.arange(length, device=first_A.device)
    is_own_AT = places_AT // length == first_A[:, None] // length
    places_AT = places_AT.clamp(max=batch.tokens_BT.numel() - 1)
    if batch.documents_BT is not None:
        documents = batch.documents_BT.flatten()
        is_own_AT &= documents[places_AT] == documents[first_A, None]
    scores_AT2 = scores_BT2.flatten(0, 1)[places_AT].masked_fill(~is_own_AT[..., None], -torch.inf)
    log_p_AT2 = scores_AT2.log_softmax(dim=1)
    answer_A2 = torch.stack((begin_A, end_A), dim=1) - first_A[:, None]
    nll_A2 = -log_p_AT2.gather(1, answer_A2[:, None])[:, 0] / 2
    with torch.no_grad():
        # The last token of a document is its separator, and no part of the text.
        in_text_AT = (types_BT.flatten()[places_AT] == 1) & is_own_AT
        in_text_AT &= torch.nn.functional.pad(is_own_AT[:, 1:], (0, 1))
        found_A2 = find_spans(log_p_AT2, in_text_AT)
        both_A4 = torch.cat((found_A2, answer_A2), dim=1)
        first_AB, last_AB = both_A4[:, ::2], both_A4[:, 1::2]
        overlap_A = (last_AB.amin(dim=1) - first_AB.amax(dim=1) + 1).clamp(min=0)
        f1_A = 2 * overlap_A.double() / (last_AB - first_AB + 1).sum(dim=1)
        nll_P = torch.cat((torch.zeros_like(nll_A2[:, :1]), nll_A2), dim=1).flatten()
    loss_sum = nll_A2.sum()
    num_correct = (found_A2 == answer_A2).all(dim=1).sum()
    found = LossOutput(loss_sum, loss_sum.detach(), num_correct, nll_P, shown_M=f1_A.sum()[None])
    return found._replace(routing_LW=output.routing_LW)


def find_spans(scores_AT2: Tensor, in_text_AT: Tensor) -> Tensor:
    """Returns the first and last place of the best span of each document, int64 [A, 2]; (0, 0): none.

    `scores_AT2` are those of each place as the first and as the last one of an answer; spans are of
    places where `in_text_AT`.
    """
    begin_AT, end_AT = scores_AT2.masked_fill(~in_text_AT[..., None], -torch.inf).unbind(dim=2)
    # The best last place from each place on.
    best_AT, behind_AT = end_AT.flip(1).cummax(dim=1)
    total_A, begin_A = (begin_AT + best_AT.flip(1)).max(dim=1)
    end_A = scores_AT2.shape[1] - 1 - behind_AT.flip(1).gather(1, begin_A[:, None])[:, 0]
    has_answer_A = total_A > scores_AT2[:, 0].sum(dim=1)
    return torch.where(has_answer_A[:, None], torch.stack((begin_A, end_A), dim=1), 0)
