"""Hashes of rows: blind to order, not to anything else."""

import dataclasses

import numpy as np
import pytest

from pretrain.datacheck.hash import RowHashes, TokenSums, hash_rows
from pretrain.rows import TokenRows


def make_rows(seed=0, num_rows=6, loss_mask=False):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 900, (num_rows, 9)).astype(np.uint16)
    starts = np.sort(rng.choice(num_rows * 9, 10, replace=False))
    flags = rng.integers(0, 2, tokens.shape).astype(bool) if loss_mask else None
    return TokenRows(tokens, np.arange(100, 100 + num_rows), starts, None, flags)


def cut(rows, first, last):
    """Rows `first` to `last`."""
    width = rows.tokens_BT.shape[1]
    mine = (rows.starts >= first * width) & (rows.starts < last * width)
    loss_mask = None if rows.loss_mask_BT is None else rows.loss_mask_BT[first:last]
    return TokenRows(
        rows.tokens_BT[first:last], rows.sample_ids_B[first:last], rows.starts[mine] - first * width, None, loss_mask
    )


@pytest.mark.parametrize("loss_mask", [False, True])
def test_parts_in_any_order_have_the_hash_of_the_whole(loss_mask):
    rows = make_rows(loss_mask=loss_mask)
    parts = [hash_rows(cut(rows, first, last)) for first, last in ((3, 6), (0, 1), (1, 3))]
    assert parts[0] + parts[1] + parts[2] == hash_rows(rows)
    assert RowHashes() + hash_rows(rows) == hash_rows(rows)


def changed(rows):
    """Rows with one thing that is another."""
    tokens = rows.tokens_BT.copy()
    tokens[2, 8] ^= 1
    swapped, ids, loss_mask = rows.tokens_BT[[1, 0, 2, 3, 4, 5]], rows.sample_ids_B.copy(), rows.loss_mask_BT.copy()
    ids[3] += 1000
    loss_mask[4, 4] ^= True
    return {
        "a token": {"tokens_BT": tokens},
        "two rows under each other's id": {"tokens_BT": swapped},
        "a sample id": {"sample_ids_B": ids},
        "the loss mask": {"loss_mask_BT": loss_mask},
        "a border": {"starts": rows.starts + (np.arange(10) == 9)},
        "no border": {"starts": rows.starts[:-1]},
    }


@pytest.mark.parametrize("what", changed(make_rows(loss_mask=True)))
def test_whatever_is_another_has_another_hash(what):
    rows = make_rows(loss_mask=True)
    other = hash_rows(dataclasses.replace(rows, **changed(rows)[what]))
    assert other.content != hash_rows(rows).content
    assert (other.samples != hash_rows(rows).samples) == (what == "a sample id")


def test_both_sides_of_a_pair_count_and_are_told_apart():
    one, other = make_rows(0), make_rows(1)
    hashes = {
        hash_rows(dataclasses.replace(target, source=source)).content
        for source, target in ((one, other), (other, one), (one, one))
    }
    assert len(hashes) == 3


def test_the_sum_of_tokens_depends_on_how_often_each_occurs_and_on_nothing_else():
    sums = TokenSums(1000)
    tokens = np.random.default_rng(0).integers(0, 1000, 5000).astype(np.uint32)
    whole = sums(tokens)
    assert whole == sums(np.sort(tokens)) == (sums(tokens[:100]) + sums(tokens[100:])) % 2**64
    others = tokens.copy()
    others[7], others[8] = others[7] - 1, others[8] + 1
    assert sums(others) != whole
    assert sums(np.append(tokens, 0)) != whole
    assert sums(tokens[:0]) == 0


def test_long_arrays_are_summed_in_pieces(monkeypatch):
    tokens = np.random.default_rng(0).integers(0, 50, 1000).astype(np.uint16)
    whole = TokenSums(50)(tokens)
    monkeypatch.setattr("pretrain.datacheck.hash.CHUNK_TOKENS", 7)
    assert TokenSums(50)(tokens) == whole
