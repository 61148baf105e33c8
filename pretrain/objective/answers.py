"""Answers to questions, by an encoder: their place in a text, or the right one of several.

Answers in texts, the first and the last token of each (Devlin et al. 2019, 4.2):

    row     question, text | question, text | ...      documents, whole
    marks   of tokens  -->  places of the document's first token, and of the answer's first and last
    loss of an answer = mean of -log p(first) and -log p(last), a softmax each over its document

A text without the answer has it at the first token of the document ([CLS]). A target is an answer:
the loss is the mean over answers, however their documents are packed. Padding has no share in the
softmax, as transformers has it for rows of one length.

An answer is right where the best span is it: that of the highest sum of both scores, of all within
the text that do not end before they begin, unless the first token's sum is as high (SQuAD 2.0, as
Devlin et al. 2019 released it). Shown is the F1 of its tokens, by their places.

Choices (Devlin et al. 2019, 4.4):

    row     question, choice | question, choice | ...      documents, all of a question together
    loss of a question = -log p(right choice), a softmax over the scores of its choices

The number of choices may differ between questions. Shown is the share of right answers by guessing.
"""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from pretrain.kinds.layouts.answers import ANSWER_BEGINS, ANSWER_ENDS
from pretrain.kinds.layouts.choices import CHOICE_BEGINS, CHOICE_IS_FIRST, CHOICE_IS_RIGHT
from pretrain.objective.loss import LossOutput, Model
from pretrain.objective.row_maker import RowContext, count_padding, place_documents
from pretrain.objective.token_kinds import TokenKind
from pretrain.rows import IGNORE_INDEX, TokenRows, Vocabulary
from pretrain.types import Batch, ModelRows, RowMaker


def build_answers(section: None, context: RowContext) -> RowMaker:
    """Questions with their texts, one or several a row."""
    return answer_rows


def answer_rows(rows: TokenRows) -> ModelRows:
    """Makes rows of questions: a target at the first token of each document, and three places."""
    assert rows.labels_BT is not None and rows.num_tokens_B is not None, "marked and padded"
    marks = rows.labels_BT[:, :-1].ravel()
    width = rows.tokens_BT.shape[1]
    row, column = np.divmod(rows.starts, width)
    is_document = column < rows.num_tokens_B[row]  # the last start of a row is that of its padding
    first = row[is_document] * (width - 1) + column[is_document]
    in_text = marks != IGNORE_INDEX
    bits = (ANSWER_BEGINS, ANSWER_ENDS)
    begins, ends = (np.flatnonzero(in_text & (marks & bit > 0)) for bit in bits)
    assert len(first) == len(begins) == len(ends), "a document has one answer"
    places = np.stack((first, begins, ends), axis=1).ravel()
    return _place(rows, first, first, np.zeros_like(first), places)


def build_choices(section: None, context: RowContext) -> RowMaker:
    """Questions with their choices, one or several a row."""
    return choice_rows


def choice_rows(rows: TokenRows) -> ModelRows:
    """Makes rows of choices: a target at the first token of the first choice of each question."""
    assert rows.labels_BT is not None and rows.num_tokens_B is not None, "marked and padded"
    marks = rows.labels_BT[:, :-1].ravel()
    begins = np.flatnonzero((marks != IGNORE_INDEX) & (marks & CHOICE_BEGINS > 0))
    (first,) = np.nonzero(marks[begins] & CHOICE_IS_FIRST)
    (right,) = np.nonzero(marks[begins] & CHOICE_IS_RIGHT)
    assert len(first) == len(right), "a question has one right choice"
    return _place(rows, begins, begins[first], right - first, begins)


def _place(
    rows: TokenRows,
    first: np.ndarray,
    asked: np.ndarray,
    targets: np.ndarray,
    places: np.ndarray,
) -> ModelRows:
    """Returns rows of documents of two texts that begin at `first`, with targets at `asked`."""
    assert rows.labels_BT is not None
    inputs = rows.tokens_BT[:, :-1].astype(np.int64)
    all_targets = np.full(inputs.size, IGNORE_INDEX, dtype=np.int64)
    all_targets[asked] = targets
    is_second = rows.labels_BT[:, :-1].ravel() != IGNORE_INDEX
    is_second[first] = False
    positions, documents = place_documents(rows, document_mask=True)
    return Batch(
        inputs,
        all_targets.reshape(inputs.shape),
        **rows.carried(),
        positions_BT=positions,
        documents_BT=documents,
        target_positions_P=places,
        token_types_BT=is_second.reshape(inputs.shape).astype(np.int64),
        num_padding=count_padding(rows, inputs.shape[1]),
    )


def sum_answer_loss(model: Model, batch: Batch) -> LossOutput:
    """Sums the losses of the answers of a batch, and shows the F1 of the tokens of each best span."""
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
    loss = LossOutput(loss_sum, loss_sum.detach(), num_correct, nll_P, shown_M=f1_A.sum()[None])
    return loss._replace(routing_LW=output.routing_LW)


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


def sum_choice_loss(model: Model, batch: Batch) -> LossOutput:
    """Sums the losses of the questions of a batch, and shows 1 over the number of its choices."""
    assert batch.target_positions_P is not None, "rows of choices"
    output = model(batch, logits=False)
    hidden_PD = output.hidden_BTD.flatten(0, 1).index_select(0, batch.target_positions_P)
    scores_P = model.head(hidden_PD)[:, 0]
    scores_P = scores_P.to(torch.promote_types(scores_P.dtype, torch.float32))
    targets_P = batch.targets_BT.flatten().index_select(0, batch.target_positions_P)
    is_first_P = targets_P != IGNORE_INDEX
    question_P = is_first_P.cumsum(dim=0)
    number_P = torch.arange(len(scores_P), device=scores_P.device)
    # The first choice of each one's question, which has the place of the right one.
    first_P = torch.where(is_first_P, number_P, 0).cummax(dim=0).values
    is_other_PP = question_P[:, None] != question_P
    is_right_P = number_P - first_P == targets_P.index_select(0, first_P)
    scores_PP = scores_P.expand_as(is_other_PP).masked_fill(is_other_PP, -torch.inf)
    nll_P = torch.where(is_right_P, scores_PP.logsumexp(dim=1) - scores_P, 0.0)
    # Among equal scores the first counts.
    is_equal_PP = scores_PP == scores_P[:, None]
    is_before_PP = number_P < number_P[:, None]
    is_beaten_PP = (scores_PP > scores_P[:, None]) | (is_equal_PP & is_before_PP)
    num_correct = (is_right_P & ~is_beaten_PP.any(dim=1)).sum()
    chance_P = is_right_P.double() / (~is_other_PP).sum(dim=1)
    loss_sum = nll_P.sum()
    sums = (loss_sum, loss_sum.detach(), num_correct, nll_P.detach(), output.routing_LW)
    return LossOutput(*sums, shown_M=chance_P.sum()[None])


def answer_kinds(rows: ModelRows, section: None, vocabulary: Vocabulary) -> list[TokenKind]:
    """Returns the kinds of the tokens of a row of answers in texts, for `pretrain data show`."""
    assert rows.target_positions_P is not None
    kinds = [TokenKind.CONTEXT] * rows.tokens_BT.shape[1]
    for _, begin, end in rows.target_positions_P.reshape(-1, 3).tolist():
        kinds[begin : end + 1] = [TokenKind.ANSWER] * (end + 1 - begin)
    return kinds


def choice_kinds(rows: ModelRows, section: None, vocabulary: Vocabulary) -> list[TokenKind]:
    """Returns the kinds of the tokens of a row of choices, for `pretrain data show`."""
    assert rows.target_positions_P is not None and rows.token_types_BT is not None
    targets = rows.targets_BT[0].tolist()
    kinds = [TokenKind.CONTEXT] * len(targets)
    right = -1
    begins = rows.target_positions_P.tolist()
    for number, (begin, end) in enumerate(pairwise([*begins, len(targets)])):
        right = right if targets[begin] == IGNORE_INDEX else number + targets[begin]
        for place in begin + np.flatnonzero(rows.token_types_BT[0, begin:end]):
            kinds[place] = TokenKind.CHOSEN if number == right else TokenKind.REJECTED
    return kinds
