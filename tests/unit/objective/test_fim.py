"""Fill in the middle: documents put back together from PSM and SPM, and nothing lost or twice."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.errors import ConfigError
from pretrain.objective import build_rows
from pretrain.objective.fim import rearrange
from pretrain.rows import IGNORE_INDEX, TokenRows, select_rows
from tests.unit.objective.texts import EOS, NAMED, PAD, context_of, rows_of

PREFIX, SUFFIX, MIDDLE = MARKS = tuple(NAMED[f"<|fim_{part}|>"] for part in ("prefix", "suffix", "middle"))


def moved(raw: TokenRows, seq_len: int, *, seed: int = 7, **fim: float) -> TokenRows:
    config, context = context_of(seq_len, num_stacks=1, seed=seed, kind="fim", fim=fim)
    assert raw.tokens_BT.shape[1] == context.lengths.row + 1
    return rearrange(raw, config.fim, np.array(MARKS), context)


def pieces_of(rows: TokenRows, row: int, length: int) -> list[list[int]]:
    """The documents of a row as far as they lie in its first `length` tokens."""
    width = rows.tokens_BT.shape[1]
    real = length if rows.num_tokens_B is None else min(length, int(rows.num_tokens_B[row]))
    starts = [s - row * width for s in rows.starts.tolist() if row * width < s < row * width + real]
    edges = [0, *starts, real]
    return [rows.tokens_BT[row, a:b].tolist() for a, b in pairwise(edges) if b > a]


def put_back(piece: list[int]) -> tuple[list[int], str]:
    """A document as it was, and its order."""
    if piece[0] != PREFIX:
        assert not set(piece) & set(MARKS)
        return piece, "plain"
    ends = piece[-1:] if piece[-1] == EOS else []
    piece = piece[: len(piece) - len(ends)]
    assert Counter(token for token in piece if token in MARKS) == Counter(MARKS)
    second, third = piece.index(SUFFIX), piece.index(MIDDLE)
    assert second < third
    before, suffix, after = piece[1:second], piece[second + 1 : third], piece[third + 1 :]
    assert suffix
    if before:
        assert after
        return [*before, *after, *suffix, *ends], "psm"
    assert len(after) >= 2, "prefix and middle"
    return [*after, *suffix, *ends], "spm"


def row_len_of(seq_len: int, max_documents: int) -> int:
    return seq_len - 3 * max_documents


@given(
    st.integers(1, 5),
    st.integers(20, 90),
    st.floats(0.05, 1),
    st.floats(0, 1),
    st.integers(3, 40),
    st.booleans(),
    st.integers(0, 1000),
)
def test_every_document_can_be_put_back(max_documents, seq_len, rate, spm_rate, longest, is_short, seed):
    row_len = row_len_of(seq_len, max_documents)
    raw = rows_of(4, row_len, seed=seed, longest=longest)
    if is_short:
        raw = TokenRows(raw.tokens_BT, raw.sample_ids_B, raw.starts, np.array([row_len + 1, row_len, row_len // 2, 0]))
    made = moved(raw, seq_len, seed=seed, max_documents=max_documents, rate=rate, spm_rate=spm_rate)
    assert made.tokens_BT.shape == (4, seq_len + 1)
    for row in range(4):
        real = row_len + 1 if raw.num_tokens_B is None else int(raw.num_tokens_B[row])
        expected, found = pieces_of(raw, row, row_len), pieces_of(made, row, seq_len + 1)
        assert (made.tokens_BT[row, made.num_tokens_B[row] :] == EOS).all()
        if not expected:
            assert not found and made.num_tokens_B[row] == 0
            continue
        is_moved = [piece[0] == PREFIX for piece in found]
        assert sum(is_moved) <= max_documents
        size = made.num_tokens_B[row] - 3 * sum(is_moved)
        # The token of the next row stays where the last document of this one does.
        if real > row_len and found[len(expected) - 1][0] != PREFIX:
            assert size == row_len + 1
            follows = int(raw.tokens_BT[row, row_len])
            if len(found) > len(expected):
                assert found.pop() == [follows]
                assert row * (row_len + 1) + row_len in raw.starts
            else:
                assert found[-1].pop() == follows
        else:
            assert size == min(real, row_len)
        assert [put_back(piece)[0] for piece in found] == expected


def test_a_document_with_room_for_three_parts_is_rearranged_and_ends_where_it_ended():
    raw = rows_of(200, 60, longest=12)
    made = moved(raw, 60 + 3 * 30, max_documents=30, rate=1.0)
    orders = Counter()
    for row in range(200):
        expected = pieces_of(raw, row, 60)
        for piece, found in zip(expected, pieces_of(made, row, made.tokens_BT.shape[1]), strict=False):
            size = len(piece) - (piece[-1] == EOS)
            order = put_back(found)[1] if size >= 3 else "short"
            orders[order] += 1
            assert (order == "plain") is False
            assert (found[-1] == EOS) == (piece[-1] == EOS) or size < 3
    assert orders["psm"] + orders["spm"] > 1000 and orders["short"] > 100
    # Half of them each: a binomial's deviation of sqrt(n)/2, five of them.
    assert abs(orders["psm"] - orders["spm"]) <= 5 * (orders["psm"] + orders["spm"]) ** 0.5


@pytest.mark.parametrize("rate", [0.25, 0.5, 1.0])
def test_documents_are_rearranged_at_the_rate_up_to_the_most_of_a_row(rate):
    raw = rows_of(1000, 60, longest=30)
    long_enough = [[len(p) - (p[-1] == EOS) >= 3 for p in pieces_of(raw, row, 60)] for row in range(len(raw.tokens_BT))]
    made = moved(raw, 60 + 3 * 40, max_documents=40, rate=rate)
    count, total = int((made.tokens_BT == PREFIX).sum()), sum(map(sum, long_enough))
    assert abs(count - rate * total) <= 5 * (rate * (1 - rate) * total) ** 0.5
    few = moved(raw, 60 + 3 * 2, max_documents=2, rate=rate)
    in_row = (few.tokens_BT == PREFIX).sum(axis=1)
    assert in_row.max() == 2
    # The first ones of a row: where there was room for all, the same are rearranged.
    assert in_row.tolist() == np.minimum((made.tokens_BT == PREFIX).sum(axis=1), 2).tolist()


def test_cuts_are_uniform():
    # Rows that are one document of five tokens: two different cuts among four places, six ways.
    raw = TokenRows(
        np.tile(np.arange(10, 16, dtype=np.uint16), (6000, 1)), np.arange(6000), np.arange(0, 36000, 6), None
    )
    made = moved(raw, 5 + 3, max_documents=1, rate=1.0, spm_rate=0.0)
    ways = Counter(tuple(row) for row in made.tokens_BT[:, :8].tolist())
    assert len(ways) == 6
    # Binomial, 1000 of 6000: a deviation of 29, five of them.
    assert all(abs(count - 1000) <= 145 for count in ways.values())


def test_nothing_of_the_stream_is_lost_or_comes_twice():
    raw = rows_of(300, 84)
    config, context = context_of(96, num_stacks=1, kind="fim")
    made = build_rows(config, context)(raw)
    real = np.arange(96) < (96 - 12 + 3 * (made.tokens_BT == PREFIX).sum(axis=1))[:, None]
    read = Counter(made.tokens_BT[real].tolist())
    assert {read.pop(mark) for mark in MARKS} == {int((made.tokens_BT == PREFIX).sum())}
    assert read == Counter(raw.tokens_BT[:, :84].ravel().tolist())
    # Where there is room for it, the first token of the next row, the target of the last one, is read as well.
    assert made.num_padding == np.maximum(96 - moved(raw, 96).num_tokens_B, 0).sum()


@pytest.mark.parametrize("document_mask", [True, False])
def test_targets_are_the_next_tokens_and_none_is_across_a_border(document_mask):
    raw = rows_of(50, 84)
    config, context = context_of(96, num_stacks=1, document_mask=document_mask, kind="fim")
    made, rows = build_rows(config, context)(raw), moved(raw, 96)
    is_target = made.targets_BT != IGNORE_INDEX
    assert made.num_targets() == is_target.sum()
    assert (made.targets_BT[is_target] == rows.tokens_BT[:, 1:][is_target]).all()
    expected = np.arange(1, 97) < rows.num_tokens_B[:, None]
    if document_mask:
        borders = np.zeros(rows.tokens_BT.shape, dtype=bool)
        borders.ravel()[rows.starts] = True
        expected &= ~borders[:, 1:]
    assert is_target.tolist() == expected.tolist()


@given(st.integers(0, 1000))
def test_a_row_does_not_depend_on_the_rows_beside_it(seed):
    raw = rows_of(6, 48, seed=seed, longest=1 + seed % 40)
    whole = moved(raw, 60, seed=seed)
    for row in range(6):
        alone = moved(select_rows(raw, np.arange(6) == row), 60, seed=seed)
        assert alone.tokens_BT[0].tolist() == whole.tokens_BT[row].tolist()
        assert alone.num_tokens_B[0] == whole.num_tokens_B[row]
        inside = (whole.starts >= row * 61) & (whole.starts < (row + 1) * 61)
        assert alone.starts.tolist() == (whole.starts[inside] - row * 61).tolist()


@pytest.mark.parametrize("longest", [6, 30])
def test_the_start_token_of_a_document_stays_where_it_is(longest):
    config, context = context_of(60 + 3 * 30, num_stacks=1, kind="fim", fim={"max_documents": 30, "rate": 1.0})
    context = replace(context, vocabulary=replace(context.vocabulary, bos=PAD))
    raw = rows_of(50, 60, longest=longest)
    raw.tokens_BT.reshape(-1)[raw.starts] = PAD
    made = rearrange(raw, config.fim, np.array(MARKS), context)
    moved_documents = 0
    for row in range(50):
        expected, found = pieces_of(raw, row, 60), pieces_of(made, row, made.tokens_BT.shape[1])
        for piece, new in zip(expected, found, strict=False):
            start = 1 if piece[0] == PAD else 0
            assert new[:start] == piece[:start]
            if len(new) > start and new[start] == PREFIX:
                moved_documents += 1
                assert put_back(new[start:])[0] == piece[start:]
    assert moved_documents > 50


def test_another_seed_moves_other_documents():
    raw = rows_of(6, 48)
    assert (moved(raw, 60, seed=1).tokens_BT != moved(raw, 60, seed=2).tokens_BT).any()


def test_a_tokenizer_without_the_tokens_is_refused():
    config, context = context_of(96, num_stacks=1, kind="fim")
    named = {"<|fim_prefix|>": PREFIX}
    message = (
        r"^objective.kind=fim needs the special tokens <\|fim_suffix\|>, <\|fim_middle\|>, which the tokenizer does "
        r"not have; prepare with them among tokenizer.special_tokens, or name its own in objective.fim.tokens$"
    )
    with pytest.raises(ConfigError, match=message):
        build_rows(config, replace(context, vocabulary=replace(context.vocabulary, named=named)))
    config, context = context_of(96, num_stacks=1, kind="fim", fim={"tokens": ["[NLU]", "[NLG]", "[S2S]"]})
    assert (build_rows(config, context)(rows_of(9, 84)).tokens_BT == NAMED["[NLU]"]).any()
