"""The plan of who works on what, over any way to cut parameters up."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.optim import matrices
from pretrain.optim.matrices import BlockPart, MatrixBlock, Span, blocks_of, cut_into_rounds, plan_parts

SHAPES = st.lists(
    st.integers(1, 6).flatmap(
        lambda width: st.lists(st.tuples(st.integers(1, 5), st.just(width)), min_size=1, max_size=3)
    ),
    min_size=1,
    max_size=6,
)


def cut_as_a_row(shapes: list[list[tuple[int, int]]], num_ranks: int) -> list[list[Span]]:
    """As ZeRO 1 and 2: all parameters in one row, cut into equal parts, the last padded."""
    sizes = [sum(map(prod, blocks)) for blocks in shapes]
    share = -(-sum(sizes) // num_ranks)
    ranks: list[list[Span]] = [[] for _ in range(num_ranks)]
    begin = 0
    for number, size in enumerate(sizes):
        for rank in range(num_ranks):
            low, high = max(begin, rank * share), min(begin + size, (rank + 1) * share)
            if low < high:
                ranks[rank].append(Span(f"p{number}", 0, low - begin, low - rank * share, high - low))
        begin += size
    return ranks


def cut_each(shapes: list[list[tuple[int, int]]], num_ranks: int) -> list[list[Span]]:
    """As ZeRO 3: every parameter into equal parts, each padded."""
    ranks: list[list[Span]] = [[] for _ in range(num_ranks)]
    begin = 0
    for number, blocks in enumerate(shapes):
        size = sum(map(prod, blocks))
        share = -(-size // num_ranks)
        for rank in range(num_ranks):
            length = min(share, size - rank * share)
            if length > 0:
                ranks[rank].append(Span(f"p{number}", 0, rank * share, begin, length))
        begin += share
    return ranks


@given(SHAPES, st.integers(1, 5), st.sampled_from([cut_as_a_row, cut_each]))
def test_every_element_is_kept_once_and_worked_on_once(shapes, num_ranks, cut):
    ranks = cut(shapes, num_ranks)
    blocks = [block for number, parts in enumerate(shapes) for block in blocks_of(f"p{number}", parts)]
    planned = plan_parts(blocks, ranks)
    for block, parts in zip(blocks, planned, strict=True):
        assert {part.block for part in parts} == {block}
        assert len({part.owner for part in parts}) == 1
        elements = [place for part in parts for place in range(part.first, part.first + part.length)]
        assert elements == list(range(block.length))
        for part in parts:
            (span,) = [s for s in ranks[part.keeper] if s.name == block.name]
            # The same element by both of its addresses: within the parameter, and within the keeper's tensor.
            assert block.offset + part.first - span.offset == part.start - span.start
            assert 0 <= part.start - span.start <= span.length - part.length


@given(SHAPES, st.integers(1, 5), st.sampled_from([cut_as_a_row, cut_each]))
def test_what_lies_whole_or_by_half_on_a_rank_stays_there(shapes, num_ranks, cut):
    blocks = [block for number, parts in enumerate(shapes) for block in blocks_of(f"p{number}", parts)]
    for parts in plan_parts(blocks, cut(shapes, num_ranks)):
        most = max(part.length for part in parts)
        if 2 * most > parts[0].block.length:
            assert parts[0].owner == next(part.keeper for part in parts if part.length == most)


def test_evenly_cut_matrices_are_spread_over_the_ranks():
    shapes = [[(4, 6)]] * 9
    blocks = [block for number, parts in enumerate(shapes) for block in blocks_of(f"p{number}", parts)]
    owners = [parts[0].owner for parts in plan_parts(blocks, cut_each(shapes, 3))]
    assert [owners.count(rank) for rank in range(3)] == [3, 3, 3]


def test_a_parameter_that_is_not_all_there_is_noticed():
    with pytest.raises(AssertionError, match="is incomplete"):
        plan_parts([MatrixBlock("p", 0, 0, (2, 3))], [[Span("p", 0, 0, 0, 5)]])


def test_a_round_is_bounded_but_holds_a_block_at_least(monkeypatch):
    monkeypatch.setattr(matrices, "ROUND_ELEMENTS", 5)
    parts = [[BlockPart(MatrixBlock(f"p{size}", 0, 0, (size,)), 0, 0, 0, 0, size)] for size in (4, 6, 1, 20, 2)]
    rounds = cut_into_rounds(parts, num_ranks=2)
    assert [[part.length for part in group] for group in rounds] == [[4, 6], [1], [20], [2]]
