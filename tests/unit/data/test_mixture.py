"""The order of a mixture: exact at every point, arithmetic at every position."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.mixture import MixtureOrder, build_period, period_counts
from pretrain.errors import ConfigError

WEIGHTS = st.lists(st.integers(1, 60), min_size=1, max_size=7)


@given(WEIGHTS)
@settings(max_examples=150)
def test_after_any_number_of_samples_each_source_has_had_its_share_to_within_one(counts):
    order = build_period(counts)
    period = len(order)
    had = np.cumsum(order[:, None] == np.arange(len(counts)), axis=0)
    for place in range(period):
        for source, count in enumerate(counts):
            assert abs(int(had[place, source]) - Fraction((place + 1) * count, period)) < 1
    assert had[-1].tolist() == counts


@pytest.mark.parametrize(
    ("weights", "counts"),
    [([0.7, 0.2, 0.1], [7, 2, 1]), ([3, 1], [3, 1]), ([0.1, 0.1], [1, 1]), ([1.0], [1]), ([1e-3, 0.999], [1, 999])],
)
def test_weights_are_the_decimals_that_they_are_written_as(weights, counts):
    assert period_counts(weights) == counts


def test_weights_that_hardly_ever_repeat_are_refused():
    with pytest.raises(ConfigError, match="write them with fewer digits"):
        period_counts([0.123456789, 0.876543211])


@given(WEIGHTS, st.integers(0, 5000), st.integers(1, 300), st.integers(1, 5))
@settings(max_examples=100)
def test_any_position_is_found_without_those_before_it(counts, start, length, step):
    order = MixtureOrder([(0, counts)])
    sources, places = order.pick(range(start, start + length * step, step))
    everything, all_places = order.pick(range(start + length * step))
    assert np.array_equal(sources, everything[start::step][:length])
    assert np.array_equal(places, all_places[start::step][:length])
    for source in range(len(counts)):
        # Every sample of a source once, in order.
        assert np.array_equal(all_places[everything == source], np.arange((everything == source).sum()))
    assert order.counts(start).tolist() == [int((everything[:start] == s).sum()) for s in range(len(counts))]


def test_milestones_change_the_weights_and_carry_the_counts():
    order = MixtureOrder([(0, [1, 0, 0]), (10, [1, 1, 0]), (30, [0, 1, 3])])
    sources, places = order.pick(range(70))
    assert set(sources[:10]) == {0}
    assert np.bincount(sources[10:30], minlength=3).tolist() == [10, 10, 0]
    assert np.bincount(sources[30:], minlength=3).tolist() == [0, 10, 30]
    for source in range(3):
        assert np.array_equal(places[sources == source], np.arange((sources == source).sum()))
    assert order.counts(30).tolist() == [20, 10, 0]
    assert order.counts(70).tolist() == [20, 20, 30]


def test_a_position_of_a_billion_costs_no_more():
    sources, places = MixtureOrder([(0, [0.7, 0.2, 0.1])]).pick(range(10**9, 10**9 + 10))
    assert sorted(np.bincount(sources).tolist()) == [1, 2, 7]
    assert places[sources == 2].tolist() == [10**8]
