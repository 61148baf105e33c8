"""Where the sources of a mixture end: known before, exact, and no matter to the others until then."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.mixture import MixtureOrder, end_sources
from tests.unit.data.test_mixture import PIECES

SUPPLIES = st.lists(st.one_of(st.none(), st.integers(0, 300)), min_size=4, max_size=4)
HORIZON = 1500


@given(PIECES, SUPPLIES)
@settings(max_examples=30, deadline=None)
def test_a_source_gives_what_it_has_and_never_more(pieces, supplies):
    starts = np.cumsum([0, *(length for length, _ in pieces[:-1])]).tolist()
    segments = [(start, weights) for start, (_, weights) in zip(starts, pieces, strict=True)]
    limits = {number: supply for number, supply in enumerate(supplies) if supply is not None}
    found = end_sources(segments, limits)
    last = HORIZON if found.end is None else min(found.end, HORIZON)
    if not last:
        return
    sources, places = MixtureOrder(found.segments).pick(range(last))
    for number, limit in limits.items():
        mine = places[sources == number]
        assert len(mine) <= limit and mine.tolist() == list(range(len(mine)))
        if found.ends.get(number, last) < last:
            assert len(mine) >= limit - 1
            assert (np.nonzero(sources == number)[0] >= found.ends[number]).sum() <= 1, "but one that it was due"
    first_end = min([*found.ends.values(), last])
    shares = MixtureOrder(segments).counts(first_end) - MixtureOrder(found.segments).counts(first_end)
    assert abs(shares).max() <= 1


def test_the_others_share_what_was_its():
    found = end_sources([(0, [2, 1, 1])], {0: 10})
    assert (found.segments, found.ends, found.end) == ([(0, [2, 1, 1]), (20, [0.0, 1, 1])], {0: 20}, None)


def test_a_source_that_ends_between_milestones_rests_behind_them_too():
    found = end_sources([(0, [1, 1]), (30, [3, 1])], {0: 12})
    assert found.segments == [(0, [1, 1]), (24, [0.0, 1]), (30, [0.0, 1])]


def test_nothing_is_read_behind_the_end_of_all_though_a_milestone_would_wake_another():
    found = end_sources([(0, [1, 0]), (30, [0, 1])], {0: 12})
    assert (found.segments, found.ends, found.end) == ([(0, [1, 0])], {0: 12}, 12)
    assert end_sources([(0, [1.0])], {0: 0}).end == 0
