"""The order of training samples: a pure function of (seed, shards, seq_len, lanes, block_samples).

The token stream of an epoch is the split's shards in an order permuted by (seed, epoch). X, the stream of a run, is
the streams of epoch 0, 1, 2, ... one after another. With N tokens an epoch and T = seq_len:

    sample j       covers tokens [j*T, j*T + T] of X: T inputs, and T targets one further on
    epoch e        owns the samples whose first token is its own: j in [ceil(e*N/T), ceil((e+1)*N/T))
    lanes          cut these into L contiguous runs whose sizes differ by at most one
    position i     of the run, the p-th of its epoch, belongs to lane p mod L, at place p div L of that lane
    blocks         of block_samples places of a lane are permuted by (seed, epoch, lane, block)

So every token but the very first is a target exactly once an epoch, nothing is dropped at an epoch's end, and any
position is found by arithmetic plus one table of L x block_samples entries (a round: the same block of every lane).
Deliberately not here: world size, micro-batches, workers and prefetch (the order cannot depend on them), and files.
"""

import hashlib
import struct
from functools import lru_cache

import numpy as np

ROUNDS_KEPT = 4
_LAST = np.uint64(2**64 - 1)


def random_bits(purpose: str, key: tuple[int, ...], count: int) -> np.ndarray:
    """Returns `count` random uint64 that depend on `purpose` (at most 16 letters) and `key` only.

    Raw Philox4x64-10 (Salmon et al. 2011) under a hashed key: numpy guarantees the raw stream of a bit generator for
    ever, which it does not for `shuffle` or `permutation`.
    """
    content = struct.pack(f"<{len(key)}Q", *key)
    digest = hashlib.blake2b(content, digest_size=16, person=purpose.encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)


def rank_bits(bits: np.ndarray) -> np.ndarray:
    """Returns the argsort of random uint64 along the last axis, int64, the same under any sorting algorithm.

    The low bits are replaced by the index, so that all keys differ and no sort meets a tie.
    """
    width = bits.shape[-1]
    low = np.uint64((1 << (width - 1).bit_length()) - 1)
    keys = (bits & ~low) | np.arange(width, dtype=np.uint64)
    keys.sort(axis=-1)
    return (keys & low).astype(np.int64)


def shard_order(num_shards: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the order of an epoch's shards: a permutation of 0..num_shards-1, int64."""
    return rank_bits(random_bits("shards", (seed, epoch), num_shards))


class SampleOrder:
    """Maps positions of the run to samples: one integer is all there is to resume from.

    Cost: O(1) a position, after O(lanes x block_samples) for each round entered, whatever the position. Safe to use
    from several threads.
    """

    def __init__(self, num_tokens: int, seq_len: int, *, seed: int, lanes: int, block_samples: int) -> None:
        """Fixes the order.

        Args:
            num_tokens: Tokens an epoch, N, at least 1.
            seq_len: Tokens a sample, T.
            seed: Seed of the shuffles.
            lanes: Number of lanes, L.
            block_samples: Places of a lane that are shuffled together.
        """
        assert min(num_tokens, seq_len, lanes, block_samples) >= 1 and seed >= 0
        self.num_tokens, self.seq_len, self.seed = num_tokens, seq_len, seed
        self.lanes, self.block_samples = lanes, block_samples
        self._round = lru_cache(ROUNDS_KEPT)(self._build_round)

    def epoch_start(self, epoch: int) -> int:
        """Returns the first position, which is also the lowest sample, of an epoch: ceil(epoch * N / T)."""
        return -(-epoch * self.num_tokens // self.seq_len)

    def epoch_of(self, position: int) -> int:
        """Returns the epoch that owns a position."""
        return position * self.seq_len // self.num_tokens

    def sample_at(self, position: int) -> tuple[int, int]:
        """Returns (epoch, sample) at a position."""
        return self.epoch_of(position), int(self.samples(range(position, position + 1))[0])

    def samples(self, positions: range) -> np.ndarray:
        """Returns the samples at ascending `positions`, int64."""
        parts = [np.empty(0, np.int64)]
        while positions:
            epoch = self.epoch_of(positions.start)
            first = self.epoch_start(epoch)
            number, offset = divmod(positions.start - first, self.lanes * self.block_samples)
            part = self._round(epoch, number)[offset :: positions.step][: len(positions)]
            parts.append(part)
            positions = positions[len(part) :]
        return np.concatenate(parts)

    def _build_round(self, epoch: int, number: int) -> np.ndarray:
        """Returns the samples of block `number` of every lane of an epoch, in the order of their positions."""
        first = self.epoch_start(epoch)
        count = self.epoch_start(epoch + 1) - first
        per_lane, num_longer = divmod(count, self.lanes)
        done = number * self.block_samples
        width = min(self.block_samples, per_lane + (num_longer > 0) - done)
        bits = random_bits("block", (self.seed, epoch, number), self.lanes * width).reshape(self.lanes, width)
        bits >>= np.uint64(1)
        if done + width > per_lane:
            bits[num_longer:, -1] = _LAST  # these lanes lack the last place; it sorts last and is cut off below
        lane = np.arange(self.lanes)
        starts = first + lane * per_lane + np.minimum(lane, num_longer) + done
        samples = (starts[:, None] + rank_bits(bits)).T.reshape(-1)[: count - done * self.lanes]
        samples.setflags(write=False)
        return samples
