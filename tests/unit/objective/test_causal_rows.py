"""Concat packing against a slow reference, one token at a time."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pretrain.objective.causal import causal_rows
from pretrain.rows import IGNORE_INDEX, TokenRows


def make_rows(num_rows: int, seq_len: int, starts: set[int], num_tokens: list[int] | None = None) -> TokenRows:
    width = seq_len + 1
    tokens = np.arange(1, num_rows * width + 1, dtype=np.uint16).reshape(num_rows, width)
    flat = np.array(sorted(starts), dtype=np.int64)
    sizes = None if num_tokens is None else np.array(num_tokens, dtype=np.int64)
    return TokenRows(tokens, np.arange(num_rows), flat, sizes)


def pack_slowly(rows: TokenRows):
    """Walks over the tokens of each row; returns inputs, targets, positions and documents as nested lists."""
    starts = set(rows.starts.tolist())
    packed = ([], [], [], [])
    for number, row in enumerate(rows.tokens_BT.tolist()):
        real = len(row) if rows.num_tokens_B is None else int(rows.num_tokens_B[number])
        position, document = -1, 0
        targets, positions, documents = [], [], []
        for column in range(len(row) - 1):
            begins = column > 0 and number * len(row) + column in starts
            position, document = (0, document + 1) if begins else (position + 1, document)
            next_begins = number * len(row) + column + 1 in starts
            targets.append(IGNORE_INDEX if next_begins or column + 1 >= real else row[column + 1])
            positions.append(position)
            documents.append(document)
        for whole, part in zip(packed, (row[:-1], targets, positions, documents), strict=True):
            whole.append(part)
    return packed


@st.composite
def rows(draw, padded: bool = False) -> TokenRows:
    num_rows, seq_len = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    starts = draw(st.sets(st.integers(0, num_rows * (seq_len + 1) - 1)))
    sizes = st.lists(st.integers(0, seq_len + 1), min_size=num_rows, max_size=num_rows)
    return make_rows(num_rows, seq_len, starts, draw(sizes) if padded else None)


@given(st.one_of(rows(), rows(padded=True)))
def test_packing_equals_the_slow_reference(raw):
    packed = causal_rows(raw, document_mask=True)
    inputs, targets, positions, documents = pack_slowly(raw)
    assert packed.tokens_BT.tolist() == inputs
    assert packed.targets_BT.tolist() == targets
    assert packed.num_targets() == sum(target != IGNORE_INDEX for row in targets for target in row)
    if packed.documents_BT is None:
        assert packed.positions_BT is None
        assert not np.any(documents)  # None says what the arrays would have said
        assert positions == [list(range(len(row))) for row in positions]
    else:
        assert packed.positions_BT.tolist() == positions
        assert packed.documents_BT.tolist() == documents
        assert np.any(documents)


@given(rows())
def test_without_a_document_mask_rows_are_shifted_and_nothing_else(raw):
    packed = causal_rows(raw, document_mask=False)
    assert packed.tokens_BT.tolist() == raw.tokens_BT[:, :-1].tolist()
    assert packed.targets_BT.tolist() == raw.tokens_BT[:, 1:].tolist()
    assert packed.positions_BT is None and packed.documents_BT is None
    assert packed.num_targets() == packed.targets_BT.size


def test_a_border_is_never_a_target():
    packed = causal_rows(make_rows(1, 6, {0, 3}), document_mask=True)
    assert packed.targets_BT.tolist() == [[2, 3, IGNORE_INDEX, 5, 6, 7]]
    assert packed.positions_BT.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert packed.documents_BT.tolist() == [[0, 0, 0, 1, 1, 1]]


def test_a_document_that_starts_right_after_a_row_leaves_the_dense_path():
    packed = causal_rows(make_rows(2, 3, {0, 3, 4}), document_mask=True)
    assert packed.targets_BT.tolist() == [[2, 3, IGNORE_INDEX], [6, 7, 8]]
    assert packed.positions_BT is None and packed.documents_BT is None


def test_dtypes_and_layout_are_those_of_the_batch_contract():
    packed = causal_rows(make_rows(3, 5, {2, 9}), document_mask=True)
    dtypes = [array.dtype for array in (packed.tokens_BT, packed.targets_BT, packed.positions_BT, packed.documents_BT)]
    assert dtypes == [np.int64, np.int64, np.int64, np.int32]
    assert all(array.flags.c_contiguous for array in (packed.tokens_BT, packed.targets_BT, packed.positions_BT))


@given(rows(padded=True), st.integers(0, 2**32 - 1))
def test_of_a_record_only_what_is_learned_is_a_target(raw, seed):
    loss_mask = np.random.default_rng(seed).random(raw.tokens_BT.shape) < 0.5
    records = replace(raw, loss_mask_BT=loss_mask)
    _, targets, _, _ = pack_slowly(raw)
    expected = [
        [target if loss_mask[row, column + 1] else IGNORE_INDEX for column, target in enumerate(found)]
        for row, found in enumerate(targets)
    ]
    made = causal_rows(records, document_mask=True, use_loss_mask=True)
    assert made.targets_BT.tolist() == expected
    assert made.num_targets() == sum(target != IGNORE_INDEX for row in expected for target in row)
    # The same records as text: every token is learned.
    assert causal_rows(records, document_mask=True, use_loss_mask=False).targets_BT.tolist() == targets
