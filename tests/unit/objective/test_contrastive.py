"""Contrastive rows and loss: beside the formula in float64, over any micro-batches, and what is no negative."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import cosine_similarity

from pretrain.data.loader import build_batch
from pretrain.evaluation.row_loss import ModelLoss
from pretrain.kinds.layouts.triples import IS_POSITIVE, TEXT_BEGINS, group_marks
from pretrain.objective.contrastive import compare_batches, compared_kinds, contrastive_rows, sum_contrastive_loss
from pretrain.objective.info_nce import CHUNK_SCORES, InfoNce
from pretrain.objective.loss_sums import pack_evaluated
from pretrain.rows import IGNORE_INDEX, TokenRows, select_rows
from pretrain.types import ModelOutput, TextBatch

WIDTH, D = 41, 6
# Texts of each record by their tokens, after its group; several records a row, and a row that could not be read.
RECORDS = [
    [(0, (5, 6), (7, 8, 9)), (300, (10, 11), (12, 13), (14, 15, 16), (17, 18))],
    [(0, (5, 6), (20, 21))],  # the query of the first record
    [],
    [(300, (22, 23), (24, 25)), (0, (26, 27), (7, 8, 9), (28, 29))],  # a group, and the first positive again
    [(2**25 + 3, (30, 31), (32, 33), (24, 25))],  # a hard negative that is a positive elsewhere
]


def raw_rows(records=RECORDS) -> TokenRows:
    """Rows as the stream gives them."""
    tokens = np.zeros((len(records), WIDTH), np.uint16)
    marks = np.full(tokens.shape, IGNORE_INDEX, np.int16)
    starts, sizes = [], []
    for row, whole in enumerate(records):
        at = 0
        for group, *texts in whole:
            for number, text in enumerate(texts):
                starts.append(row * WIDTH + at)
                tokens[row, at : at + len(text)] = text
                marks[row, at : at + len(text)] = 0
                first = group_marks(group) if number == 0 else (TEXT_BEGINS | IS_POSITIVE * (number == 1),)
                marks[row, at : at + len(first)] = first
                at += len(text)
        sizes.append(at)
        starts.append(row * WIDTH + at)
    return TokenRows(tokens, np.arange(len(records)), np.array(starts), np.array(sizes), labels_BT=marks)


def flat(records=RECORDS):
    return [record for row in records for record in row]


class Means(torch.nn.Module):
    """Vectors of documents: the mean of the rows of a table for their tokens, with dropout."""

    def __init__(self, learned=True, dropout=0.0):
        super().__init__()
        self.table = torch.nn.Embedding(40, D, dtype=torch.float64)
        torch.nn.init.normal_(self.table.weight, generator=torch.Generator().manual_seed(1))
        self.log_scale = torch.nn.Parameter(torch.tensor([0.3], dtype=torch.float64)) if learned else None
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, batch, logits):
        hidden_BTD = self.dropout(self.table(batch.tokens_BT))
        is_same = batch.documents_BT[:, :, None] == batch.documents_BT[:, None]
        return ModelOutput(is_same.double() @ hidden_BTD / is_same.sum(2, keepdim=True))

    def head(self, vectors_PD, loss):
        return loss(vectors_PD, self.log_scale)


def expected(model, records, temperature, symmetric, widths=()):
    """The mean over widths of the losses of all records, by the definition."""

    def vector(text):
        return model.table(torch.tensor(text)).mean(0)

    def cosine(a, b, width):
        return cosine_similarity(vector(a)[:width], vector(b)[:width], dim=0)

    factor = (1.0 if model.log_scale is None else model.log_scale.exp()) / temperature
    losses = []
    for number, (group, query, positive, *_) in enumerate(records):
        others = [one for place, one in enumerate(records) if place != number]
        others = [one for one in others if one[1] != query and one[2] != positive and not (group and one[0] == group)]
        texts = [text for own, _, *rest in others for text in rest]
        # Of a record that is out, hard negatives are still texts, unless they are of the group, or the positive.
        rest = [one for one in records if one not in others and not (group and one[0] == group and one[1] != query)]
        texts += [text for _, _, _, *hard in rest for text in hard]
        texts = [positive, *(text for text in texts if text != positive)]
        queries = [query, *(one[1] for one in others)]
        for width in (*widths, D):
            scores = factor * torch.stack([cosine(query, text, width) for text in texts])
            loss = scores.logsumexp(0) - scores[0]
            if symmetric:
                back = factor * torch.stack([cosine(one, positive, width) for one in queries])
                loss = (loss + back.logsumexp(0) - back[0]) / 2
            losses.append(loss / (1 + len(widths)))
    return torch.stack(losses).sum()


CASES = [
    {"temperature": 0.05, "symmetric": True, "widths": []},
    {"temperature": 0.5, "symmetric": False, "widths": []},
    {"temperature": 0.1, "symmetric": True, "widths": [2, 4]},
]


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("settings", CASES)
def test_loss_and_gradients_are_those_of_the_formula(settings, learned):
    model, reference = Means(learned).train(), Means(learned)
    loss = sum_contrastive_loss(model, build_batch(contrastive_rows(raw_rows())), **settings)
    wanted = expected(reference, flat(), **settings)
    torch.testing.assert_close(loss.loss_sum, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss.nll_P.sum(), wanted, rtol=1e-12, atol=1e-12)
    loss.loss_sum.backward()
    wanted.backward()
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        evaluated = ModelLoss(model.eval(), lambda *of: sum_contrastive_loss(*of, **settings)).evaluate(
            build_batch(contrastive_rows(raw_rows()))
        )
    assert evaluated[0].item() == pytest.approx(wanted.item(), rel=1e-12)


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("settings", CASES)
def test_micro_batches_of_any_size_have_the_loss_and_the_gradient_of_the_whole(settings, cut, monkeypatch):
    """With dropout, which the second pass repeats."""
    monkeypatch.setattr("pretrain.objective.info_nce.CHUNK_SCORES", 2 * len(flat()))
    rows = raw_rows()
    parts = [np.isin(np.arange(5), range(first, first + cut)) for first in range(0, 5, cut)]
    batches = [build_batch(contrastive_rows(select_rows(rows, part))) for part in parts]
    model, reference = Means(dropout=0.2).train(), Means().train()
    outputs = []
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        with torch.no_grad():
            outputs.append(pack_evaluated(sum_contrastive_loss(model, batch, **settings)))
    compared = compare_batches(batches, outputs, 0, **settings)
    total = 0.0
    for seed, batch in enumerate(compared):
        torch.manual_seed(seed)
        loss = sum_contrastive_loss(model, batch, **settings)
        loss.loss_sum.backward()
        total += loss.nll_sum.item()
    # The same dropout in one pass over all: vectors of the micro-batches, joined.
    vectors, texts = [], []
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        hidden = reference_hidden(reference, batch)
        vectors.append(hidden)
        texts.append(batch.texts)
    joined = TextBatch(
        *(torch.cat([getattr(one, name) for one in texts]) for name in ("roles_P", "keys_P", "groups_P"))
    )
    slopes, results = InfoNce(**settings)(torch.cat(vectors).detach(), joined, reference.log_scale.detach())
    assert total == pytest.approx(results[:, 0].sum().item(), rel=1e-12)
    (torch.cat(vectors) * slopes).sum().backward()
    torch.testing.assert_close(model.table.weight.grad, reference.table.weight.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(model.log_scale.grad, results[:, 3].sum()[None], rtol=1e-10, atol=1e-12)
    assert 2 * len(flat()) < CHUNK_SCORES


def reference_hidden(model, batch):
    """Vectors of the texts of a batch, with the dropout of the model under test."""
    model.dropout.p = 0.2
    return model(batch, logits=False).hidden_BTD.flatten(0, 1)[batch.target_positions_P]


def test_a_right_record_has_the_largest_score_among_its_candidates():
    vectors = torch.eye(4, dtype=torch.float64)[[0, 0, 1, 2, 3]]  # the second query is at no text
    texts = TextBatch(*map(torch.tensor, ([0, 1, 0, 1, 2], [1, 2, 3, 4, 5], [0] * 5)))
    _, results = InfoNce(temperature=0.1)(vectors, texts, torch.zeros(1, dtype=torch.float64))
    assert results[:, 1].tolist() == [1.0, 0.0] and results[:, 2].tolist() == [1.0, 0.0]


def test_rows_have_a_target_for_each_record_and_positions_of_each_text():
    rows = contrastive_rows(raw_rows())
    sizes = [[len(text) for _, *texts in row for text in texts] for row in RECORDS]
    firsts = [row * (WIDTH - 1) + at for row, one in enumerate(sizes) for at in np.cumsum([0, *one])[:-1].tolist()]
    assert rows.target_positions_P.tolist() == firsts
    assert rows.num_targets() == len(flat())
    assert rows.positions_BT.ravel()[firsts].tolist() == [0] * len(firsts)
    assert rows.texts.roles_P.tolist() == [min(n, 2) for _, *texts in flat() for n in range(len(texts))]
    assert rows.texts.groups_P.tolist() == [group for group, *texts in flat() for _ in texts]
    same = {}
    for key, text in zip(rows.texts.keys_P.tolist(), [text for _, *texts in flat() for text in texts], strict=True):
        assert same.setdefault(key, text) == text
    assert len(same) == len({text for _, *texts in flat() for text in texts})
    first = replace(contrastive_rows(select_rows(raw_rows(), np.arange(5) == 0)))
    kinds = compared_kinds(first, None, SimpleNamespace())
    assert [str(kind) for kind in kinds[:14:2]] == [
        "query",
        "chosen",
        "chosen",
        "query",
        "chosen",
        "rejected",
        "rejected",
    ]
