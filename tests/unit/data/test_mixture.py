"""The order of a mixture: exact at every point, arithmetic at every position."""

from math import lcm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data import mixture
from pretrain.data.mixture import MixtureOrder, MixtureShares, deal, deal_period, period_counts
from pretrain.errors import ConfigError

WEIGHTS = st.lists(st.integers(1, 60), min_size=1, max_size=7)


PIECES = st.lists(
    st.tuples(st.integers(1, 200), st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any)),
    min_size=1,
    max_size=4,
)


def had_after_each(sources, num_sources):
    """Samples that each source has had, int64 [samples, sources]."""
    return np.cumsum(sources[:, None] == np.arange(num_sources), axis=0)


@given(WEIGHTS)
@settings(max_examples=150)
def test_after_any_number_of_samples_each_source_has_had_its_share_to_within_one(counts):
    period = sum(counts)
    had = had_after_each(MixtureOrder([(0, counts)]).pick(range(period))[0], len(counts))
    shares_by_period = np.arange(1, period + 1)[:, None] * np.array(counts)
    assert np.all(abs(had * period - shares_by_period) < period)
    assert had[-1].tolist() == counts


@given(PIECES)
@settings(max_examples=60)
def test_each_source_has_its_share_to_within_one_before_and_after_every_milestone(pieces):
    ends = np.cumsum([length for length, _ in pieces]).tolist()
    order = MixtureOrder([(start, weights) for start, (_, weights) in zip([0, *ends], pieces, strict=False)])
    sources, places = order.pick(range(ends[-1]))
    had = had_after_each(sources, 4)
    scale = lcm(*(sum(weights) for _, weights in pieces))
    rates = [np.tile(np.array(weights) * (scale // sum(weights)), (length, 1)) for length, weights in pieces]
    assert np.all(abs(had * scale - np.concatenate(rates).cumsum(axis=0)) < scale)
    assert np.array_equal(places, had[np.arange(len(had)), sources] - 1)
    for position in (1, ends[0], ends[-1]):
        assert order.counts(position).tolist() == had[position - 1].tolist()


def test_what_stands_before_a_milestone_depends_on_the_weights_behind_it_only_in_its_last_period():
    end = 10**9 + 3
    alone, followed = MixtureOrder([(0, [3, 4, 5])]), MixtureOrder([(0, [3, 4, 5]), (end, [0, 0, 1])])
    for positions in (range(1000), range(end - 1000, end - 12)):
        for one, other in zip(alone.pick(positions), followed.pick(positions), strict=True):
            assert np.array_equal(one, other)
    assert set(followed.pick(range(end + 12, end + 1000))[0]) == {2}


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


@given(st.lists(st.one_of(st.integers(0, 3), st.integers(1, 900)), min_size=1, max_size=12).filter(any))
@settings(max_examples=60)
def test_a_period_dealt_in_blocks_is_that_of_one_sample_after_another(counts):
    one_by_one = deal(MixtureShares([(0, counts)]), [0] * len(counts), 0, sum(counts))
    assert np.array_equal(deal_period(counts), one_by_one)


def test_a_block_that_began_in_another_state_is_dealt_again(monkeypatch):
    counts = [533, 49, 49, 38, 33, 33, 31, 31, 27, 26, 25, 23, 19, 18, 16, 14, 9, 9, 6, 11]
    expected = deal_period(counts)
    wrong = mixture._likely_states

    def swapped(rates, starts):
        return np.roll(wrong(rates, starts), 1, axis=0) * (starts > 0)[:, None]

    monkeypatch.setattr(mixture, "_likely_states", swapped)
    assert np.array_equal(deal_period(counts), expected)


def test_a_million_samples_are_dealt_in_a_few_thousand_turns(monkeypatch):
    counts = [2654, 6215, 9128, 9159, 14316, 16969, 18471, 19878, 23466, 25248]
    counts += [26538, 27563, 31235, 31846, 33076, 33507, 38233, 49533, 49674, 533291]
    turns = []
    deal_blocks = mixture._deal_blocks
    monkeypatch.setattr(mixture, "_deal_blocks", lambda *args: turns.append(args[-1]) or deal_blocks(*args))
    order = MixtureOrder([(0, [count / 1e6 for count in counts])])
    assert sum(turns) <= 4000
    assert order.counts(10**6).tolist() == counts
    sources, places = order.pick(range(10**6 - 1000, 10**6 + 1000))
    assert np.array_equal(sources[1000:], order.pick(range(1000))[0])
    assert order.counts(10**6 - 1000)[sources[0]] == places[0]


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
