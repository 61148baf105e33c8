"""A digest of which samples a step trained on, equal for every world size.

    each rank:  sum over its rows of mix64(sample id, row of the global batch), mod 2**64
    the step:   sum over the ranks, mod 2**64

A sum commutes, so the cut into ranks and micro-batches does not matter; the row is mixed in, so the order of the
rows does. It detects mistakes, not adversaries. The engine's all-reduce adds float64: `split64` makes two exact
halves of a digest, `join64` puts their sums together.
"""

import numpy as np

from pretrain.utils.rng import mix64


def digest_rows(sample_ids: np.ndarray, rows: np.ndarray) -> int:
    """Returns the digest of some rows of a global batch, below 2**64.

    Args:
        sample_ids: Sample of each row, int64.
        rows: Number of each row within the global batch, int64.
    """
    mixed = mix64(mix64(sample_ids.astype(np.uint64)) ^ rows.astype(np.uint64))
    return int(mixed.sum(dtype=np.uint64))


def split64(digest: int) -> tuple[float, float]:
    """Returns the high and low 32 bits; float64 adds 2**21 ranks of them exactly."""
    return float(digest >> 32), float(digest & 0xFFFFFFFF)


def join64(high: float, low: float) -> int:
    """Returns the digest whose halves, summed over the ranks, are `high` and `low`."""
    return ((int(high) << 32) + int(low)) % 2**64
