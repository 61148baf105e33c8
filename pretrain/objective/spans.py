"""Which tokens of a row span corruption takes out: `random_spans_noise_mask` of Raffel et al. 2020, for many rows.

row tokens  =  kept, noise, kept, noise, ...      num_spans of each, all at least one token long, noise last
lengths of the kept, and of the noise, are uniform among the ways of cutting them so
"""

import numpy as np

from pretrain.config.lengths import Corruption
from pretrain.utils.rng import draw_uniform


def draw_noise(found: Corruption, row_len: int, seed: int, sample_ids: np.ndarray) -> np.ndarray:
    """Returns which tokens are taken out, bool [B, row_len]; exactly `num_noise` a row, in `num_spans` spans."""
    kept = _cut(row_len - found.num_noise, found.num_spans, "kept spans", seed, sample_ids)
    noise = _cut(found.num_noise, found.num_spans, "noise spans", seed, sample_ids)
    lengths = np.stack((kept, noise), axis=2).reshape(len(sample_ids), -1)
    is_noise = np.tile(np.arange(2 * found.num_spans) % 2 == 1, len(sample_ids))
    return np.repeat(is_noise, lengths.reshape(-1)).reshape(len(sample_ids), row_len)


def _cut(count: int, parts: int, purpose: str, seed: int, sample_ids: np.ndarray) -> np.ndarray:
    """Returns lengths [B, parts], each at least 1, that add up to `count`; all such are equally likely."""
    numbers = draw_uniform(purpose, seed, sample_ids, count - 1)
    cuts = np.sort(np.argsort(numbers, axis=1, kind="stable")[:, : parts - 1], axis=1) + 1
    ends = np.concatenate((cuts, np.full((len(sample_ids), 1), count)), axis=1)
    return np.diff(ends, axis=1, prepend=0)
