"""The order of samples: exactly once an epoch, local in lanes, mixed in blocks, and found by arithmetic."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.data.order import SampleOrder, rank_bits, shard_order

shapes = {
    "num_tokens": st.integers(1, 3000),
    "seq_len": st.integers(1, 40),
    "lanes": st.integers(1, 20),
    "block_samples": st.integers(1, 50),
    "seed": st.integers(0, 2**63 - 1),
}


def build_order(num_tokens=5000, seq_len=8, seed=7, lanes=4, block_samples=16):
    return SampleOrder(num_tokens, seq_len, seed=seed, lanes=lanes, block_samples=block_samples)


def sample_at(order: SampleOrder, position: int) -> int:
    return order.samples(range(position, position + 1)).item()


def epoch_positions(order: SampleOrder, epoch: int) -> range:
    return range(order.epoch_start(epoch), order.epoch_start(epoch + 1))


@given(**shapes, epoch=st.integers(0, 5))
def test_every_sample_of_an_epoch_comes_exactly_once(epoch, **shape):
    order = build_order(**shape)
    positions = epoch_positions(order, epoch)
    assert sorted(order.samples(positions).tolist()) == list(positions)


@given(**shapes, epoch=st.integers(0, 5))
def test_a_sample_belongs_to_the_epoch_that_its_first_token_lies_in(epoch, **shape):
    order = build_order(**shape)
    for position in epoch_positions(order, epoch):
        assert order.epoch_of(position) == epoch == sample_at(order, position) * order.seq_len // order.num_tokens


@given(**shapes, start=st.integers(0, 2000), count=st.integers(0, 300), step=st.integers(1, 7))
def test_any_range_of_positions_gives_what_single_positions_give(start, count, step, **shape):
    order = build_order(**shape)
    positions = range(start, start + count, step)
    assert order.samples(positions).tolist() == [sample_at(order, position) for position in positions]


@given(**shapes, epoch=st.integers(0, 3))
def test_lanes_are_equal_contiguous_runs_and_blocks_stay_inside_them(epoch, **shape):
    order = build_order(**shape)
    samples = order.samples(epoch_positions(order, epoch))
    expected_start = order.epoch_start(epoch)
    sizes = []
    for lane in range(order.lanes):
        places = samples[lane :: order.lanes]
        sizes.append(len(places))
        for first in range(0, len(places), order.block_samples):
            block = places[first : first + order.block_samples]
            assert sorted(block.tolist()) == list(range(expected_start, expected_start + len(block)))
            expected_start += len(block)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("num_tokens", "seq_len", "lanes", "starts"),
    [
        (1, 1, 1, [0, 1, 2, 3]),  # one sample an epoch
        (10, 4, 8, [0, 3, 5, 8]),  # fewer samples than lanes; epochs of 3, 2 and 3
        (3, 10, 2, [0, 1, 1, 1, 2]),  # epochs shorter than a sample: some own none
    ],
)
def test_small_epochs_are_cut_as_computed_by_hand(num_tokens, seq_len, lanes, starts):
    order = build_order(num_tokens, seq_len, lanes=lanes)
    assert [order.epoch_start(epoch) for epoch in range(len(starts))] == starts
    assert sorted(order.samples(range(starts[-1])).tolist()) == list(range(starts[-1]))


def test_epochs_seeds_lanes_and_blocks_are_shuffled_differently():
    order = build_order(num_tokens=4096, seq_len=1, lanes=2, block_samples=1024)
    samples = order.samples(range(4096))
    blocks = [samples[lane:4096:2][half : half + 1024] % 1024 for lane in (0, 1) for half in (0, 1024)]
    blocks.append(order.samples(epoch_positions(order, 1))[:2048:2] % 1024)
    blocks.append(build_order(4096, 1, seed=8, lanes=2, block_samples=1024).samples(range(2048))[::2] % 1024)
    for number, block in enumerate(blocks):
        for other in (*blocks[:number], np.arange(1024)):
            assert (block == other).sum() < 10  # two random permutations agree in one place on average


def test_a_block_is_shuffled_evenly():
    """Over many epochs each sample of a block comes at each place about equally often (chi-square, 49 cells)."""
    order = build_order(num_tokens=7, seq_len=1, lanes=1, block_samples=7)
    counts = np.zeros((7, 7))
    for epoch in range(2000):
        counts[np.arange(7), order.samples(epoch_positions(order, epoch)) - 7 * epoch] += 1
    expected = 2000 / 7
    assert ((counts - expected) ** 2 / expected).sum() < 70  # 36 degrees of freedom: p = 0.0006, at a fixed seed


def test_the_order_never_changes_between_releases_or_numpy_versions():
    order = build_order(num_tokens=120, seq_len=8, seed=7, lanes=2, block_samples=4)
    assert order.samples(range(18)).tolist() == [0, 11, 3, 8, 2, 9, 1, 10, 4, 14, 5, 13, 7, 12, 6, 15, 25, 17]
    assert shard_order(8, seed=7, epoch=3).tolist() == [2, 7, 6, 0, 4, 3, 5, 1]


@given(st.integers(1, 300), st.integers(0, 2**63 - 1), st.integers(0, 100))
def test_the_order_of_shards_is_a_permutation(num_shards, seed, epoch):
    assert sorted(shard_order(num_shards, seed, epoch).tolist()) == list(range(num_shards))


def test_equal_bits_are_ranked_by_index():
    assert rank_bits(np.zeros(5, dtype=np.uint64)).tolist() == [0, 1, 2, 3, 4]


def test_a_position_far_into_a_terabyte_costs_one_round():
    order = SampleOrder(10**12, 1024, seed=1, lanes=16, block_samples=8192)
    for done, position in enumerate((0, 10**9, 10**12, 10**15)):
        epoch = order.epoch_of(position)
        assert epoch == position * 1024 // 10**12
        assert order.epoch_start(epoch) <= sample_at(order, position) < order.epoch_start(epoch + 1)
        assert order._round.cache_info().misses == done + 1
    assert order._round(0, 0).size == 16 * 8192


def test_rounds_are_kept_not_rebuilt_and_not_piled_up():
    order = build_order(num_tokens=10**6, seq_len=1, lanes=4, block_samples=100)
    for start in range(0, 40_000, 50):
        order.samples(range(start, start + 50))
    assert order._round.cache_info().misses == 100
    assert order._round.cache_info().currsize <= 4
