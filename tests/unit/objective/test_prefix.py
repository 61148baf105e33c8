"""Prefix language modelling: rows against a slow reference, and what a model sees of them."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.loader import build_batch
from pretrain.objective.causal import prefix_rows
from pretrain.objective.loss import sum_token_loss
from pretrain.rows import IGNORE_INDEX, TokenRows, select_rows
from pretrain.types import Batch
from pretrain.utils.rng import draw_uniform
from tests.unit.model.tiny import build, tiny_config
from tests.unit.objective.test_causal_rows import make_rows, pack_slowly, rows

SEED = 5


def split_slowly(raw: TokenRows, document_mask: bool) -> tuple[list[list[bool]], list[list[int]]]:
    """Returns which tokens are a prefix, and the targets, document by document."""
    width = raw.tokens_BT.shape[1]
    if not document_mask:
        raw = TokenRows(raw.tokens_BT, raw.sample_ids_B, np.empty(0, np.int64), raw.num_tokens_B)
    targets = pack_slowly(raw)[1]
    prefixes = []
    for row, sample in enumerate(raw.sample_ids_B.tolist()):
        real = width if raw.num_tokens_B is None else int(raw.num_tokens_B[row])
        end = min(real, width - 1)
        edges = sorted({0, *(int(s) - row * width for s in raw.starts if 0 <= s - row * width < end), end})
        prefix = [False] * (width - 1)
        for first, last in pairwise(edges):
            length = last - first
            number = float(draw_uniform("prefix", SEED, np.array([sample]), first + 1)[0, first])
            size = min(1 + int(number * (length - 1)), length - 1)
            for place in range(first, first + size):
                prefix[place] = True
        for place in range(width - 2):
            if prefix[place + 1]:
                targets[row][place] = IGNORE_INDEX
        prefixes.append(prefix)
    return prefixes, targets


@settings(max_examples=150)
@given(st.one_of(rows(), rows(padded=True)), st.booleans())
def test_prefixes_and_targets_equal_the_slow_reference(raw, document_mask):
    found = prefix_rows(raw, SEED, document_mask)
    prefixes, targets = split_slowly(raw, document_mask)
    assert found.prefix_BT is not None and found.prefix_BT.tolist() == prefixes
    assert found.targets_BT.tolist() == targets
    assert found.num_targets() == sum(target != IGNORE_INDEX for row in targets for target in row)
    assert found.prefix_BT.dtype == bool and found.prefix_BT.shape == found.tokens_BT.shape


@pytest.mark.parametrize("document_mask", [True, False])
def test_a_row_is_split_alike_whatever_rows_are_beside_it(document_mask):
    raw = make_rows(7, 20, {0, 3, 4, 30, 63, 90, 100}, [21, 20, 3, 0, 1, 21, 9])
    whole = prefix_rows(raw, SEED, document_mask)
    chosen = np.arange(7) % 3 == 0
    for part in (chosen, ~chosen):
        found = prefix_rows(select_rows(raw, part), SEED, document_mask)
        assert found.prefix_BT is not None and whole.prefix_BT is not None
        assert np.array_equal(found.prefix_BT, whole.prefix_BT[part])
        assert np.array_equal(found.targets_BT, whole.targets_BT[part])


def test_a_document_of_one_token_has_no_prefix_and_its_own_border():
    found = prefix_rows(make_rows(1, 4, {0, 1, 2}), SEED, document_mask=True)
    assert found.prefix_BT is not None
    assert found.prefix_BT[0, :2].tolist() == [False, False]
    assert found.targets_BT[0, :2].tolist() == [IGNORE_INDEX] * 2  # the next tokens are of other documents
    assert found.prefix_BT[0, 2:].tolist() == [True, False]
    assert found.targets_BT[0, 2:].tolist() == [4, 5]


def test_every_cut_of_a_document_is_equally_likely():
    raw = make_rows(40_000, 6, set())
    found = prefix_rows(raw, SEED, document_mask=True)
    assert found.prefix_BT is not None
    counts = np.bincount(found.prefix_BT.sum(axis=1), minlength=7)
    assert counts[0] == counts[6] == 0
    assert np.abs(counts[1:6] - 8000).max() < 4 * np.sqrt(8000 * 0.8)
    # Neither does the cut of one document tell that of the next.
    pairs = prefix_rows(make_rows(40_000, 6, {7 * row + 3 for row in range(40_000)}), SEED, document_mask=True)
    assert pairs.prefix_BT is not None
    first, second = pairs.prefix_BT[:, :3].sum(axis=1), pairs.prefix_BT[:, 3:].sum(axis=1)
    cells = np.bincount(2 * (first - 1) + second - 1, minlength=4)
    assert np.abs(cells - 10_000).max() < 4 * np.sqrt(10_000 * 0.75)


LENGTHS = [6, 1, 9, 2]


def packed_row() -> TokenRows:
    tokens = np.random.default_rng(3).integers(1, 60, (1, 19)).astype(np.uint16)
    return TokenRows(tokens, np.array([12]), np.cumsum([0, *LENGTHS]), None)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_packed_row_gives_what_its_documents_give_alone(attention):
    model = build(tiny_config(), dtype=torch.float64, attention=attention)
    packed = build_batch(prefix_rows(packed_row(), SEED, document_mask=True))
    logits = model(packed).logits_BTV[0]
    assert packed.prefix_BT is not None and packed.prefix_BT.any()
    first, loss = 0, torch.zeros((), dtype=torch.float64)
    for length in LENGTHS:
        part = slice(first, first + length)
        alone = Batch(packed.tokens_BT[:, part], packed.targets_BT[:, part], prefix_BT=packed.prefix_BT[:, part])
        torch.testing.assert_close(logits[part], model(alone).logits_BTV[0], rtol=1e-9, atol=1e-9)
        loss += sum_token_loss(model, alone).loss_sum.detach()
        first += length
    torch.testing.assert_close(sum_token_loss(model, packed).loss_sum.detach(), loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_prefix_sees_all_of_itself_and_nothing_else_and_a_suffix_all_before_it(attention):
    model = build(tiny_config(), dtype=torch.float64, attention=attention)
    packed = build_batch(prefix_rows(packed_row(), SEED, document_mask=True))
    assert packed.prefix_BT is not None and packed.documents_BT is not None
    prefix, documents = packed.prefix_BT[0], packed.documents_BT[0]
    places = torch.arange(len(prefix))
    before = model(packed).logits_BTV[0]
    for changed in range(len(prefix)):
        tokens = packed.tokens_BT.clone()
        tokens[0, changed] = 60
        after = model(replace(packed, tokens_BT=tokens)).logits_BTV[0]
        moved = (after[:, :60] != before[:, :60]).any(dim=1)
        expected = (documents == documents[changed]) & ((places >= changed) | prefix[changed])
        assert moved.tolist() == expected.tolist(), changed
