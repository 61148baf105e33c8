"""Slow ranks by the times of their forward passes."""

import random
import statistics
from collections.abc import Iterator

import numpy as np
import pytest

from pretrain.run.slow_ranks import SlowRanks, relative


@pytest.mark.parametrize("size", [2, 3, 4, 5, 16])
def test_a_rank_is_compared_with_the_median_of_the_others(size):
    times = np.random.default_rng(size).uniform(1, 2, size)
    others = [statistics.median(np.delete(times, rank)) for rank in range(size)]
    np.testing.assert_array_equal(relative(times), times / others)


def steps_of(num_ranks: int, slow: dict[int, tuple[int, int, float]], noise: float = 0.04) -> Iterator[list[float]]:
    """Times of steps, of a rank in `slow` longer between two of them, by a factor."""
    random.seed(3)
    step = 0
    while True:
        step += 1
        times = [random.gauss(1, noise) for _ in range(num_ranks)]
        for rank, (first, last, factor) in slow.items():
            times[rank] *= factor if first <= step <= last else 1
        yield times


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("first", range(40, 45))
def test_a_rank_that_is_20_percent_slower_is_named_within_30_steps_and_until_it_recovers(num_ranks, first):
    ranks = SlowRanks()
    named = []
    for step, times in zip(range(1, 301), steps_of(num_ranks, {1: (first, first + 99, 1.2)}), strict=False):
        ranks.add(times)
        assert set(ranks.slow) <= {1}
        named += [step] if ranks.slow else []
    assert first < named[0] < first + 30
    assert first + 99 <= named[-1] < first + 99 + 30
    assert len(named) == named[-1] - named[0] + 1


def test_hiccups_first_steps_and_unmeasured_steps_name_no_rank():
    ranks = SlowRanks()
    for step, times in zip(range(1, 2001), steps_of(4, {2: (1, 5, 9.0)}), strict=False):
        if step % 40 < 8:
            times[step // 40 % 4] *= 8  # two blocks of a rank
        ranks.add([0.0, *times[1:]] if step % 7 == 0 else times)
        assert ranks.slow == {}


def test_a_rank_alone_is_not_slow():
    ranks = SlowRanks()
    for _ in range(100):
        ranks.add([1.0])
        ranks.add([])
    assert ranks.slow == {}
