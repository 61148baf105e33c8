"""Which positions are left out: every other one comes once, in order, whatever the cut into reads."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.data.order import SkipRanges

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda p: (p[0], p[0] + p[1])), max_size=5)


def kept(skips: SkipRanges, count: int) -> list[int]:
    """The first `count` positions that are not in a range, one by one."""
    found, position = [], 0
    while len(found) < count:
        if not any(first <= position < end for first, end in skips.ranges):
            found.append(position)
        position += 1
    return found


@given(RANGES)
def test_places_count_the_positions_that_are_left(pairs):
    skips = SkipRanges.of(pairs)
    expected = kept(skips, 80)
    assert [skips.position_of(place) for place in range(80)] == expected
    assert [skips.place_of(position) for position in expected] == list(range(80))


@given(RANGES, st.integers(0, 60), st.integers(0, 30))
def test_spans_are_these_positions_in_as_few_ranges_as_there_can_be(pairs, start, length):
    skips = SkipRanges.of(pairs)
    spans = skips.spans(range(start, start + length))
    assert [position for span in spans for position in span] == kept(skips, start + length)[start:]
    assert all(one.stop < other.start for one, other in pairwise(spans))


def test_a_cursor_within_or_at_the_edge_of_a_range_goes_on_behind_it():
    skips = SkipRanges.of([(10, 20)])
    assert [skips.position_of(skips.place_of(position)) for position in (9, 10, 15, 20, 21)] == [9, 20, 20, 20, 21]


def test_ranges_that_touch_or_overlap_are_one():
    assert SkipRanges.of([[30, 40], [10, 20], [20, 25], [12, 14]]).ranges == ((10, 25), (30, 40))
    assert SkipRanges.of([]).spans(range(3, 9)) == [range(3, 9)]


@pytest.mark.parametrize("pair", [[5, 5], [5, 4], [-1, 4], [0.0, 4.0], ["0", "4"], [True, 4], [1], [1, 2, 3]])
def test_what_is_no_range_is_refused(pair):
    with pytest.raises(ValueError):
        SkipRanges.of([pair])
