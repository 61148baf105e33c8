"""Rows of similar length in one batch: the order of samples, regrouped, for rows that are padded and not packed.

    groups       of GROUP_BATCHES global batches: the samples at [g W, (g + 1) W) of the order below, W = batches x rows
    in a group   sorted by length, cut into batches, the batches permuted by (seed, g)

A group holds what it held, so every sample still comes exactly once an epoch, and any position is found by one group.
The number of rows of a global batch is part of the order; world size and micro-batch are not.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from pretrain.data.order import SampleOrder, random_bits, rank_bits

GROUP_BATCHES = 64
GROUPS_KEPT = 2


class BucketOrder:
    """Maps positions of the run to samples.

    Args:
        order: The order that is regrouped.
        lengths_of: Returns the length of each of some samples, int64.
        batch_rows: Rows of a global batch.
        seed: Of the permutation of batches.
    """

    def __init__(
        self, order: SampleOrder, lengths_of: Callable[[np.ndarray], np.ndarray], *, batch_rows: int, seed: int
    ) -> None:
        self._order, self._lengths_of, self._rows, self._seed = order, lengths_of, batch_rows, seed
        self._size = GROUP_BATCHES * batch_rows
        self._group = lru_cache(GROUPS_KEPT)(self._build_group)

    def samples(self, positions: range) -> np.ndarray:
        """Returns the samples at ascending positions, one apart, int64."""
        parts = [np.empty(0, np.int64)]
        at = positions.start
        while at < positions.stop:
            number, offset = divmod(at, self._size)
            part = self._group(number)[offset : offset + positions.stop - at]
            parts.append(part)
            at += len(part)
        return np.concatenate(parts)

    def _build_group(self, number: int) -> np.ndarray:
        samples = self._order.samples(range(number * self._size, (number + 1) * self._size))
        by_length = samples[np.argsort(self._lengths_of(samples), kind="stable")].reshape(GROUP_BATCHES, self._rows)
        return by_length[rank_bits(random_bits("buckets", (self._seed, number), GROUP_BATCHES))].reshape(-1)
