"""Lookahead over the shards of the next samples: the order in which a remote folder is fetched.

    position -> its block of places (order.py) -> for each lane, the shards of its reads from there
             -> those of this block, which are read at the same time, then the others, by the block
                that needs them
    offset   -> the shards of the fixed order from there on                            (validation)

The store gets the list whenever reading enters another block or another shard; a local folder gets
none. Not here: fetching (`shards/`) and reading (`stream.py`).
"""

import threading
from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from pretrain.data.order import SampleOrder
from pretrain.shards.index import SplitIndex
from pretrain.shards.store import ShardStore

AHEAD_SHARDS = 32

Layout = tuple[list[int], list[int]]
"""Shards in the order of an epoch, and the offset at which each starts."""


def layout_of(sizes: np.ndarray, order: np.ndarray) -> Layout:
    """Returns the layout of shards in an order, by their sizes, int64."""
    ends = np.cumsum(sizes[order])
    return order.tolist(), (ends - sizes[order]).tolist()


class Lookahead:
    """Follows the reads of one stream. Thread-safe; threads may be some samples apart."""

    def __init__(self, store: ShardStore, split: SplitIndex, reader: str) -> None:
        """Starts without a list; `reader` is a name of the stream that is unique on the store."""
        self._store = store
        self._split = split
        self._reader = reader
        self._lock = threading.Lock()
        self._last: list[tuple[int, ...]] = []

    def follow(self, order: SampleOrder, layout: Callable[[int], Layout], position: int, *, overlap: int = 1) -> None:
        """Announces reads from `position` on; see `shards_ahead`. Raises: as `ShardStore.upcoming`."""
        block = block_of(order, position)
        if self._enters(block):
            self._announce(*shards_ahead(order, layout, block, overlap=overlap))

    def follow_fixed(self, layout: Layout, start: int, end: int, total: int) -> None:
        """Announces reads from `start` to `end` of a layout, and later ones up to `total`."""
        shards, starts = layout
        places = (start, min(end, total) - 1, total - 1)
        first, last, final = (bisect_right(starts, place) - 1 for place in places)
        if start < total and self._enters((first,)):
            self._announce(shards[first : min(last + AHEAD_SHARDS, final) + 1], last - first + 1)

    def _enters(self, place: tuple[int, ...]) -> bool:
        """Returns True for a new place; a thread in the last one but one changes nothing."""
        with self._lock:
            if place in self._last:
                return False
            self._last = [*self._last[-1:], place]
            return True

    def _announce(self, shards: list[int], at_once: int) -> None:
        names = [self._split.shards[shard].name for shard in shards]
        self._store.upcoming(names, at_once=at_once, reader=self._reader)


def block_of(order: SampleOrder, position: int) -> tuple[int, int]:
    """Returns the epoch of a position, and the number of its block in each lane."""
    epoch = order.epoch_of(position)
    return epoch, (position - order.epoch_start(epoch)) // (order.lanes * order.block_samples)


def shards_ahead(
    order: SampleOrder,
    layout: Callable[[int], Layout],
    block: tuple[int, int],
    *,
    overlap: int = 1,
    ahead: int = AHEAD_SHARDS,
) -> tuple[list[int], int]:
    """Returns shards of a block and of later ones, in the order of need, and how many the block has.

    Costs O(lanes x ahead), independent of the size of the data. The layout is by epoch, the block
    that of `block_of`. A sample reads `overlap` tokens beyond its own: 1, the last target; of bins,
    0. At most `ahead` shards beyond those of the block are listed, of this epoch and the next.
    """
    epoch, number = block
    needs = _needs(order, layout, epoch, number, overlap, ahead)
    now = {shard for needed_by, shard in needs if needed_by == number}
    needs += _needs(order, layout, epoch + 1, 0, overlap, ahead)
    shards = list(dict.fromkeys(shard for _, shard in needs))
    return shards[: len(now) + ahead], len(now)


def _needs(
    order: SampleOrder, layout: Callable[[int], Layout], epoch: int, block: int, overlap: int, ahead: int
) -> list[tuple[int, int]]:
    """Returns (first block that needs it, shard) of an epoch from a block on, sorted by block."""
    first = order.epoch_start(epoch)
    per_lane, num_longer = divmod(order.epoch_start(epoch + 1) - first, order.lanes)
    needs = []
    for lane in range(order.lanes):
        start = first + lane * per_lane + min(lane, num_longer)
        end = start + per_lane + (lane < num_longer)
        begin = start + block * order.block_samples
        if begin >= end:
            continue
        place = begin * order.seq_len
        last = end * order.seq_len + overlap
        now_last = min(end, begin + order.block_samples) * order.seq_len + overlap
        beyond = 0
        while place < last and beyond <= ahead:
            beyond += place >= now_last
            # A sample may begin in the shard before; what it overlaps is its last.
            sample = max(begin, (place - overlap) // order.seq_len)
            which, offset = divmod(place, order.num_tokens)
            shards, starts = layout(which)
            slot = bisect_right(starts, offset) - 1
            needs.append(((sample - start) // order.block_samples, shards[slot]))
            ends = starts[slot + 1] if slot + 1 < len(starts) else order.num_tokens
            place += ends - offset
    return sorted(needs, key=lambda need: need[0])
