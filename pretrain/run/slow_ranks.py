"""Ranks that compute more slowly than the others, by the time of their forward passes.

    a step     seconds of all ranks
    5 steps    a block: the sum of each rank over the median of the others' sums
    5 blocks   median from `NAMED` on, all but one from `USUAL` on  ->  slow
               median below `USUAL`                                 ->  as the others again

A synchronous step lasts as long on every rank as on the slowest, which waits for none: only time
without collectives tells them apart. Blocks even out short hiccups, and their median longer ones.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

BLOCK_STEPS = 5
BLOCKS = 5
STEPS = BLOCK_STEPS * BLOCKS
"""Steps after which a slow rank is named."""
NAMED = 1.1
USUAL = 1.05
"""Times the median of the others: of a rank that is 20% slower half of it is room for noise."""
_Times = np.ndarray[tuple[int], np.dtype[np.float64]]


class SlowRanks:
    """The slow ranks of a world. All ranks that add the same times name the same."""

    def __init__(self) -> None:
        self._sums: list[_Times] = []
        self._blocks: deque[_Times] = deque(maxlen=BLOCKS)
        self._num_blocks = 0
        self.slow: dict[int, float] = {}
        """Time of each, in times the median of the others."""

    def add(self, seconds: Sequence[float]) -> None:
        """Adds a step: seconds of all ranks, of which one is 0 where a step does not count."""
        if len(seconds) < 2 or min(seconds) <= 0:
            return
        self._sums.append(np.array(seconds))
        if len(self._sums) < BLOCK_STEPS:
            return
        self._num_blocks += 1
        if self._num_blocks > 1:  # the first one compiles and allocates
            self._blocks.append(relative(np.sum(self._sums, axis=0)))
        self._sums.clear()
        if len(self._blocks) == BLOCKS:
            self._judge()

    def _judge(self) -> None:
        blocks = np.sort(self._blocks, axis=0)
        middle = np.median(blocks, axis=0)
        slow = (middle >= NAMED) & (blocks[1] >= USUAL)
        for rank in self.slow:
            slow[rank] = middle[rank] >= USUAL
        self.slow = {int(rank): float(middle[rank]) for rank in np.flatnonzero(slow)}


def relative(times_W: _Times) -> _Times:
    """Returns the time of each rank over the median of the other ranks' times."""
    size = len(times_W)
    order = np.argsort(times_W)
    ranked = times_W[order]
    # Without the one at a place, the middle of the rest moves by one for places up to it.
    places = np.arange(size)
    low = (size - 2) // 2
    high = (size - 1) // 2
    medians = (ranked[low + (places <= low)] + ranked[high + (places <= high)]) / 2
    result = np.empty(size)
    result[order] = ranked / medians
    return result
