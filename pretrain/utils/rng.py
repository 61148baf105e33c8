"""Random numbers as a pure function of their purpose: no generator, no state, any order, any rank.

    number i of a row = splitmix64's i-th, from a key of (purpose, seed, sample id)

splitmix64 (Steele et al. 2014) passes the usual batteries; it is a few integer operations over
whole arrays. Not here: permutations of a run's samples (data/order.py), which must not repeat.
"""

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(values: np.ndarray) -> np.ndarray:
    """Returns a bijective scramble of uint64 values: the step and the finaliser of splitmix64."""
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def draw_uniform(purpose: str, seed: int, sample_ids: np.ndarray, count: int) -> np.ndarray:
    """Returns `count` numbers in [0, 1) for each sample id, int64 [B]; float64 [B, count].

    Numbers of other purposes and seeds are independent; the first ones do not depend on `count`.
    """
    return (_draw_bits(purpose, seed, sample_ids, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw_bytes(purpose: str, seed: int, sample_id: int, count: int) -> np.ndarray:
    """Returns `count` uniform bytes for a sample id, uint8; independent as in `draw_uniform`."""
    bits = _draw_bits(purpose, seed, np.array([sample_id]), -(-count // 8))[0]
    return bits.astype("<u8", copy=False).view(np.uint8)[:count]


def _draw_bits(purpose: str, seed: int, sample_ids: np.ndarray, count: int) -> np.ndarray:
    digest = hashlib.blake2b(f"{purpose} {seed}".encode(), digest_size=8).digest()
    keys_B = mix64(mix64(sample_ids.astype(np.uint64)) ^ np.frombuffer(digest, np.uint64))
    return mix64(keys_B[:, None] + np.arange(count, dtype=np.uint64) * _GOLDEN)
