"""The order in which shards are needed, against what the samples of each block really read."""

from itertools import islice

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.lookahead import Lookahead, block_of, shards_ahead
from pretrain.data.order import SampleOrder, shard_order
from pretrain.shards.index import build_split
from pretrain.shards.store import LocalStore
from tests.helpers.shards import describe_shard


def layouts(sizes, seed):
    def layout(epoch):
        shards = shard_order(len(sizes), seed, epoch)
        ends = np.cumsum(np.array(sizes)[shards])
        return shards.tolist(), (ends - np.array(sizes)[shards]).tolist()

    return layout


def blocks_and_shards(order, layout, sizes, overlap):
    """Yields each block of a run and the shards that its samples read: sample by sample, token by token."""
    owners = {}

    def owner(token):
        epoch, offset = divmod(token, order.num_tokens)
        if epoch not in owners:
            owners[epoch] = np.repeat(layout(epoch)[0], np.array(sizes)[layout(epoch)[0]]).tolist()
        return owners[epoch][offset]

    position = 0
    while True:
        block, shards = block_of(order, position), set()
        while block_of(order, position) == block:
            sample = order.samples(range(position, position + 1)).item()
            shards |= {owner(sample * order.seq_len + n) for n in range(order.seq_len + overlap)}
            position += 1
        yield block, shards


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 1),
    seq_len=st.integers(1, 7),
    lanes=st.integers(1, 5),
    block_samples=st.integers(1, 6),
    seed=st.integers(0, 9),
    overlap=st.sampled_from([0, 1]),
)
def test_shards_come_in_the_order_in_which_blocks_read_them(sizes, seq_len, lanes, block_samples, seed, overlap):
    order = SampleOrder(sum(sizes), seq_len, seed=seed, lanes=lanes, block_samples=block_samples)
    layout = layouts(sizes, seed)
    read = list(islice(blocks_and_shards(order, layout, sizes, overlap), 40))
    for number, (block, shards) in enumerate(read):
        found, at_once = shards_ahead(order, layout, block, overlap=overlap)
        assert set(found[:at_once]) == shards and len(found) == len(set(found))
        seen = set(shards)
        for (epoch, _), later in read[number + 1 :]:
            # Two epochs are looked through: this one and the next.
            if epoch > block[0] + 1 or len(seen) == len(found):
                break
            new = later - seen
            assert set(found[len(seen) : len(seen) + len(new)]) == new
            seen |= new


def test_only_so_many_are_looked_ahead():
    sizes = [100] * 50
    order = SampleOrder(sum(sizes), 10, seed=1, lanes=4, block_samples=2)
    for ahead in (0, 1, 7):
        found, at_once = shards_ahead(order, layouts(sizes, 1), (0, 3), ahead=ahead)
        assert at_once >= 4 and len(found) == at_once + ahead


class Listener(LocalStore):
    """Remembers what it is told."""

    def __init__(self):
        self.told = []

    def upcoming(self, names, *, at_once=1, reader=""):
        self.told.append((names, at_once, reader))


def named_split(sizes):
    return build_split([describe_shard(f"{n}", size) for n, size in enumerate(sizes)], 1)


def test_the_store_is_told_once_a_block_whatever_the_threads_do():
    sizes = [20, 30, 10]
    order = SampleOrder(60, 5, seed=0, lanes=2, block_samples=2)  # blocks of 4 positions, 12 samples an epoch
    store = Listener()
    lookahead = Lookahead(store, named_split(sizes), "train")
    for position in (0, 3, 4, 2, 5, 3, 7, 8, 6, 12):
        lookahead.follow(order, layouts(sizes, 0), position)
    assert len(store.told) == 4  # blocks 0, 1 and 2, and the next epoch's first; those who are late say nothing
    names, at_once, reader = store.told[1]
    shards, expected = shards_ahead(order, layouts(sizes, 0), (0, 1))
    assert (names, at_once, reader) == ([str(shard) for shard in shards], expected, "train")


def test_windows_need_the_shards_from_theirs_on():
    sizes = [20, 30, 10, 40]
    store = Listener()
    lookahead = Lookahead(store, named_split(sizes), "validation")
    layout = ([0, 1, 2, 3], [0, 20, 50, 60])
    for start, end in ((0, 11), (10, 26), (21, 31), (45, 65), (90, 99), (200, 210)):
        lookahead.follow_fixed(layout, start, end, 70)
    told = [(names, at_once) for names, at_once, _ in store.told]
    assert told == [(["0", "1", "2", "3"], 1), (["1", "2", "3"], 1)]
