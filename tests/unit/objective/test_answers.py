"""Answers in texts and among choices: rows, loss and best spans beside transformers and a search of all."""

import numpy as np
import pytest
import torch
import transformers

from pretrain.data.loader import build_batch
from pretrain.evaluation.row_loss import ModelLoss
from pretrain.kinds.layouts.answers import ANSWER_BEGINS, ANSWER_ENDS
from pretrain.kinds.layouts.choices import CHOICE_BEGINS, CHOICE_IS_FIRST, CHOICE_IS_RIGHT
from pretrain.objective.answers import (
    answer_rows,
    choice_rows,
    find_spans,
    sum_answer_loss,
    sum_choice_loss,
)
from pretrain.rows import IGNORE_INDEX, TokenRows, select_rows
from pretrain.types import ModelOutput
from tests.helpers.lent import Lent, lend, quiet_transformers

WIDTH = 33
# Tokens of the question and of the text, and the answer's first and last place in the document; the
# fourth is without an answer, and the last row could not be read.
QUESTIONS = [[(5, 9, 8, 10), (4, 6, 5, 5)], [(3, 20, 3, 21)], [(2, 11, 0, 0), (2, 14, 15, 15)], []]
TINY = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TINY |= {"max_position_embeddings": 40, "attn_implementation": "eager", "pad_token_id": 0, "initializer_range": 0.3}


def raw_rows(questions=QUESTIONS) -> TokenRows:
    """Rows as the stream gives them."""
    rng = np.random.default_rng(1)
    tokens = np.zeros((len(questions), WIDTH), np.uint16)
    marks = np.full(tokens.shape, IGNORE_INDEX, np.int16)
    starts, sizes = [], []
    for row, documents in enumerate(questions):
        at = 0
        for question, text, first, last in documents:
            starts.append(row * WIDTH + at)
            end = at + question + text
            tokens[row, at:end] = rng.integers(3, 99, end - at)
            marks[row, at + question : end] = 0
            for place, bit in ((first, ANSWER_BEGINS), (last, ANSWER_ENDS)):
                marks[row, at + place] = max(marks[row, at + place], 0) | bit
            at = end
        sizes.append(at)
        if at < WIDTH - 1:
            starts.append(row * WIDTH + at)
    return TokenRows(tokens, np.arange(len(questions)), np.array(starts), np.array(sizes), labels_BT=marks)


def make(family: str, folder, kind: str = "QuestionAnswering") -> Lent:
    values = TINY if family != "DistilBert" else {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4}
    values = values | ({"type_vocab_size": 1} if family == "Roberta" else {})
    values = values | ({"hidden_dim": 48, "max_position_embeddings": 40} if family == "DistilBert" else {})
    torch.manual_seed(0)
    with quiet_transformers():
        config = getattr(transformers, f"{family}Config")(**values, num_labels=2)
        return lend(getattr(transformers, f"{family}For{kind}")(config), folder)


def documents_of(rows: TokenRows, questions=QUESTIONS):
    """Ids, types and answer of each document, by itself."""
    for row, documents in enumerate(questions):
        at = 0
        for question, text, first, last in documents:
            ids = torch.from_numpy(rows.tokens_BT[row, at : at + question + text].astype(np.int64))[None]
            yield ids, (torch.arange(question + text) >= question).long()[None], (first, last)
            at += question + text


def test_a_row_has_a_target_and_three_places_for_each_question():
    made = answer_rows(raw_rows())
    assert made.num_targets() == 5
    assert np.argwhere(made.targets_BT != IGNORE_INDEX).tolist() == [[0, 0], [0, 14], [1, 0], [2, 0], [2, 13]]
    assert made.target_positions_P.reshape(-1, 3).tolist() == [
        [0, 8, 10], [14, 19, 19], [32, 35, 53], [64, 64, 64], [77, 92, 92]
    ]  # fmt: skip
    types = [[0] * question + [1] * text for documents in QUESTIONS for question, text, _, _ in documents]
    assert made.token_types_BT[made.documents_BT >= 0].tolist() == [kind for document in types for kind in document]
    assert made.positions_BT[0, 13:16].tolist() == [13, 0, 1] and made.num_padding == 8 + 9 + 3 + 32


@pytest.mark.parametrize("family", ["Bert", "Roberta", "DistilBert", "Llama", "GPT2", "Falcon"])
def test_the_loss_is_that_of_transformers_on_each_question_alone(family, tmp_path):
    """RoBERTa has one token type, and others none: the second text is not told from the first."""
    lent = make(family, tmp_path / "theirs")
    found = sum_answer_loss(lent.ours, build_batch(answer_rows(raw_rows())))
    losses = []
    for ids, types, (first, last) in documents_of(raw_rows()):
        inputs = {"token_type_ids": types} if family == "Bert" else {}
        places = {"start_positions": torch.tensor([first]), "end_positions": torch.tensor([last])}
        losses.append(lent.theirs(ids, **inputs, **places).loss)
    torch.testing.assert_close(found.loss_sum, torch.stack(losses).sum(), rtol=1e-5, atol=1e-5)
    by_target = found.nll_P.view(-1, 3).sum(dim=1)
    torch.testing.assert_close(by_target, torch.stack(losses).detach(), rtol=1e-5, atol=1e-5)


class KnownScores:
    """A model whose scores are known."""

    def __init__(self, scores_BT2):
        self.scores_BT2, self.head = scores_BT2, lambda hidden: hidden

    def __call__(self, batch, *, logits):
        return ModelOutput(self.scores_BT2)


def test_gradients_are_those_of_two_softmaxes_over_each_document():
    scores = torch.randn(4, 32, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    sum_answer_loss(KnownScores(scores), build_batch(answer_rows(raw_rows()))).loss_sum.backward()
    found, scores.grad = scores.grad, None
    for row, documents in enumerate(QUESTIONS):
        at = 0
        for question, text, *places in documents:
            sides = scores[row, at : at + question + text].T
            torch.nn.functional.cross_entropy(sides, torch.tensor(places)).backward()
            at += question + text
    torch.testing.assert_close(found, scores.grad, rtol=1e-12, atol=1e-14)
    assert not found[3].any() and not found[0, 24:].any()


def best_span(scores: torch.Tensor, in_text: list[bool]) -> tuple[int, int]:
    """The highest sum of a first and a last place, by a search of all spans; (0, 0) if none is above its own."""
    best, found = scores[0].sum(), (0, 0)
    places = [place for place, inside in enumerate(in_text) if inside]
    for first in places:
        for last in places:
            if first <= last and scores[first, 0] + scores[last, 1] > best:
                best, found = scores[first, 0] + scores[last, 1], (first, last)
    return found


def test_the_best_span_is_the_one_that_a_search_of_all_finds():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(200, 13, 2, generator=generator)
    scores[:50, 0] += 1.0
    in_text = (torch.arange(13) >= 4) & (torch.arange(13) < torch.randint(4, 13, (200, 1), generator=generator))
    expected = [best_span(one, inside) for one, inside in zip(scores, in_text.tolist(), strict=True)]
    assert list(map(tuple, find_spans(scores, in_text).tolist())) == expected
    assert 20 < expected.count((0, 0)) < 150
    equal = torch.zeros(1, 4, 2)
    assert find_spans(equal, torch.tensor([[False, True, True, True]])).tolist() == [[0, 0]]


def test_right_answers_and_f1_are_those_of_the_best_spans(tmp_path):
    lent = make("Bert", tmp_path / "theirs")
    right, overlaps = 0, []
    for ids, types, (first, last) in documents_of(raw_rows()):
        with torch.no_grad():
            output = lent.theirs(ids, token_type_ids=types)
        scores = torch.stack((output.start_logits[0], output.end_logits[0]), dim=1)
        begin, end = best_span(scores, [*types[0, :-1].bool().tolist(), False])
        common = len({*range(begin, end + 1)} & {*range(first, last + 1)})
        right += (begin, end) == (first, last)
        overlaps.append(2 * common / (end - begin + 1 + last - first + 1))
    with torch.no_grad():
        found = sum_answer_loss(lent.ours, build_batch(answer_rows(raw_rows())))
    assert found.num_correct.item() == right
    assert found.shown_M.tolist() == pytest.approx([sum(overlaps)], rel=1e-9) and sum(overlaps) > 0


def test_a_separator_and_the_question_are_never_the_answer_and_half_of_it_has_half_of_f1():
    batch = build_batch(answer_rows(raw_rows([[(3, 8, 4, 7)]])))
    scores = torch.zeros(1, 32, 2)
    scores[0, 6], scores[0, 8, 1] = 9.0, 8.0
    scores[0, 1] = scores[0, 10] = 20.0  # of the question, and of the last token
    found = sum_answer_loss(KnownScores(scores), batch)
    # The answer is 4 to 7, the best span 6 alone: 2 x 1 / (1 + 4).
    assert (found.num_correct.item(), found.shown_M.tolist()) == (0, [0.4])
    scores[0, 4, 0] = scores[0, 7, 1] = 30.0
    found = sum_answer_loss(KnownScores(scores), batch)
    assert (found.num_correct.item(), found.shown_M.tolist()) == (1, [1.0])


def test_the_sums_of_rows_are_those_of_the_rows_alone(tmp_path):
    loss = ModelLoss(make("Bert", tmp_path / "theirs").ours, sum_answer_loss)
    by_row = loss.evaluate_rows(build_batch(answer_rows(raw_rows())))
    alone = [select_rows(raw_rows(), np.arange(4) == row) for row in range(4)]
    expected = torch.stack([loss.evaluate(build_batch(answer_rows(rows)))[:2] for rows in alone])
    torch.testing.assert_close(by_row, expected, rtol=1e-6, atol=1e-6)
    assert by_row[3].tolist() == [0, 0]


def test_a_batch_without_a_question_has_no_loss_and_gradients_of_zero(tmp_path):
    model = make("Bert", tmp_path / "theirs").ours
    found = sum_answer_loss(model, build_batch(answer_rows(raw_rows([[], []]))))
    found.loss_sum.backward()
    assert (found.loss_sum.item(), found.num_correct.item(), found.shown_M.tolist()) == (0, 0, [0])
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


# Sizes of the question and of its choices, and the place of the right one; a row could not be read.
CHOICES = [[(3, (4, 2), 1), (2, (3, 1, 2), 0)], [], [(4, (3, 2, 4, 1), 2)]]


def choices_of(questions=CHOICES) -> TokenRows:
    """Rows of choices as the stream gives them."""
    rng = np.random.default_rng(1)
    tokens = np.zeros((len(questions), WIDTH), np.uint16)
    marks = np.full(tokens.shape, IGNORE_INDEX, np.int16)
    starts, sizes = [], []
    for row, asked in enumerate(questions):
        at = 0
        for question, sizes_of_choices, right in asked:
            text = rng.integers(3, 99, question)
            for number, size in enumerate(sizes_of_choices):
                starts.append(row * WIDTH + at)
                end = at + question + size
                tokens[row, at:end] = [*text, *rng.integers(3, 99, size)]
                marks[row, at + question : end] = 0
                marks[row, at] = CHOICE_BEGINS + CHOICE_IS_FIRST * (number == 0) + CHOICE_IS_RIGHT * (number == right)
                at = end
        sizes.append(at)
        starts.append(row * WIDTH + at)
    return TokenRows(tokens, np.arange(len(questions)), np.array(starts), np.array(sizes), labels_BT=marks)


def test_a_row_has_a_target_for_each_question_and_a_place_for_each_choice():
    made = choice_rows(choices_of())
    assert made.num_targets() == 3
    assert np.argwhere(made.targets_BT != IGNORE_INDEX).tolist() == [[0, 0], [0, 12], [2, 0]]
    assert made.targets_BT[made.targets_BT != IGNORE_INDEX].tolist() == [1, 0, 2]
    assert made.target_positions_P.tolist() == [0, 7, 12, 17, 20, 64, 71, 77, 85]
    types = [
        kind for asked in CHOICES for size, choices, _ in asked for one in choices for kind in [0] * size + [1] * one
    ]
    assert made.token_types_BT[made.documents_BT >= 0].tolist() == types


@pytest.mark.parametrize("family", ["Bert", "Roberta", "DistilBert", "Electra"])
def test_the_loss_of_choices_is_that_of_transformers_on_each_question_alone(family, tmp_path):
    lent = make(family, tmp_path / "theirs", "MultipleChoice")
    rows = choices_of()
    found = sum_choice_loss(lent.ours, build_batch(choice_rows(rows)))
    losses, right = [], 0
    for row, asked in enumerate(CHOICES):
        at = 0
        for question, choices, label in asked:
            longest = question + max(choices)
            inputs = {name: torch.zeros(1, len(choices), longest, dtype=torch.int64) for name in INPUTS}
            for number, size in enumerate(choices):
                end = at + question + size
                inputs["input_ids"][0, number, : question + size] = torch.tensor(rows.tokens_BT[row, at:end].tolist())
                inputs["attention_mask"][0, number, : question + size] = 1
                inputs["token_type_ids"][0, number, question : question + size] = 1
                at = end
            if family not in ("Bert", "Electra"):
                del inputs["token_type_ids"]
            output = lent.theirs(**inputs, labels=torch.tensor([label]))
            losses.append(output.loss)
            right += int(output.logits.argmax()) == label
    torch.testing.assert_close(found.loss_sum, torch.stack(losses).sum(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.nll_P[found.nll_P > 0], torch.stack(losses).detach(), rtol=1e-5, atol=1e-5)
    assert found.num_correct.item() == right
    assert found.shown_M.tolist() == pytest.approx([1 / 2 + 1 / 3 + 1 / 4])
    found.loss_sum.backward()
    ours = lent.ours.head.weight.grad.clone()
    torch.stack(losses).sum().backward()
    head = next(weight for name, weight in lent.theirs.named_parameters() if name == "classifier.weight")
    torch.testing.assert_close(ours, head.grad, rtol=1e-4, atol=1e-5)


INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def test_among_equal_scores_the_first_choice_counts():
    made = build_batch(choice_rows(choices_of()))
    found = sum_choice_loss(KnownScores(torch.zeros(3, 32, 1)), made)
    assert found.num_correct.item() == 1
    assert found.loss_sum.item() == pytest.approx(np.log([2, 3, 4]).sum(), rel=1e-6)
    none = sum_choice_loss(KnownScores(torch.zeros(2, 32, 1)), build_batch(choice_rows(choices_of([[], []]))))
    assert (none.loss_sum.item(), none.num_correct.item(), none.shown_M.tolist()) == (0, 0, [0])
