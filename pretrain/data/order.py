"""The order of training samples: a pure function of (seed, shards, seq_len, lanes, block_samples).

The token stream of an epoch is the split's shards in an order permuted by (seed, epoch). X, the
stream of a run, is the streams of epoch 0, 1, 2, ... one after another. With N tokens an epoch and
T = seq_len:

    sample j     covers tokens [j*T, j*T + T] of X: T inputs, and T targets one further on
    epoch e      owns the samples whose first token is its own: j in [ceil(e*N/T), ceil((e+1)*N/T))
    lanes        cut these into L contiguous runs whose sizes differ by at most one
    position i   of the run, the p-th of its epoch, is at place p div L of lane p mod L
    blocks       of block_samples places of a lane are permuted by (seed, epoch, lane, block)

So every token but the very first is a target exactly once an epoch, nothing is dropped at an
epoch's end, and any position is found by arithmetic plus one table of L x block_samples entries (a
round: the same block of every lane). A run may jump over ranges of positions (`SkipRanges`).
Deliberately not here: world size, micro-batches, workers and prefetch (the order cannot depend on
them), and files.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

ROUNDS_KEPT = 4
_LAST = np.uint64(2**64 - 1)


def random_bits(purpose: str, key: tuple[int, ...], count: int) -> np.ndarray:
    """Returns `count` random uint64 that depend on `purpose` (at most 16 letters) and `key` only."""
    # Raw Philox4x64-10 (Salmon et al. 2011) under a hashed key: numpy guarantees the raw stream of a
    # bit generator for ever, which it does not for `shuffle` or `permutation`.
    content = struct.pack(f"<{len(key)}Q", *key)
    digest = hashlib.blake2b(content, digest_size=16, person=purpose.encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)


def rank_bits(bits: np.ndarray) -> np.ndarray:
    """Returns the argsort of random uint64 along the last axis, int64."""
    width = bits.shape[-1]
    # The low bits are replaced by the index, so that all keys differ and any algorithm sorts alike.
    low = np.uint64((1 << (width - 1).bit_length()) - 1)
    keys = (bits & ~low) | np.arange(width, dtype=np.uint64)
    keys.sort(axis=-1)
    return (keys & low).astype(np.int64)


def shard_order(num_shards: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the order of an epoch's shards: a permutation of 0..num_shards-1, int64."""
    return rank_bits(random_bits("shards", (seed, epoch), num_shards))


class SampleOrder:
    """Maps positions of the run to samples: one integer is all there is to resume from.

    Cost: O(1) a position, after O(lanes x block_samples) for each round entered. Thread-safe.
    """

    def __init__(self, num_tokens: int, seq_len: int, *, seed: int, lanes: int, block_samples: int) -> None:
        """Takes N, T, the seed of the shuffles, L, and the places of a lane shuffled together."""
        assert min(num_tokens, seq_len, lanes, block_samples) >= 1 and seed >= 0
        self.num_tokens = num_tokens
        self.seq_len = seq_len
        self.seed = seed
        self.lanes = lanes
        self.block_samples = block_samples
        self._round = lru_cache(ROUNDS_KEPT)(self._build_round)

    def epoch_start(self, epoch: int) -> int:
        """Returns the first position of an epoch, also its lowest sample: ceil(epoch * N / T)."""
        return -(-epoch * self.num_tokens // self.seq_len)

    def epoch_of(self, position: int) -> int:
        """Returns the epoch that owns a position."""
        return position * self.seq_len // self.num_tokens

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
        """Returns the samples of block `number` of every lane of an epoch, by position."""
        first = self.epoch_start(epoch)
        count = self.epoch_start(epoch + 1) - first
        per_lane, num_longer = divmod(count, self.lanes)
        done = number * self.block_samples
        width = min(self.block_samples, per_lane + (num_longer > 0) - done)
        bits = random_bits("block", (self.seed, epoch, number), self.lanes * width)
        bits = bits.reshape(self.lanes, width) >> np.uint64(1)
        if done + width > per_lane:
            # These lanes lack the last place: it sorts last and is cut off below.
            bits[num_longer:, -1] = _LAST
        lane = np.arange(self.lanes)
        starts = first + lane * per_lane + np.minimum(lane, num_longer) + done
        samples = (starts[:, None] + rank_bits(bits)).T.reshape(-1)[: count - done * self.lanes]
        samples.setflags(write=False)
        return samples


@dataclass(frozen=True, slots=True)
class SkipRanges:
    """Ascending ranges [from, to) of positions that a run jumps over, made with `of`.

        place     0, 1, 2, ...                       count of the samples that are trained on
        position  0, 1, 2, ..., from-1, to, to+1     their position; from .. to-1 are never read

    A rollback after a loss spike continues behind the samples of the spike (Chowdhery et al. 2022,
    PaLM, section 5.1). Every other sample still comes exactly once, on any number of ranks; the
    cursor of a run stays a position, with the same meaning under ranges that are added later.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(pairs: Iterable[Sequence[Any]]) -> "SkipRanges":
        """Returns the union of ranges. Raises: ValueError: Not whole numbers, 0 <= from < to."""
        merged: list[tuple[int, int]] = []
        for first, end in sorted(map(_checked, pairs)):
            if merged and first <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((first, end))
        return SkipRanges(tuple(merged))

    def place_of(self, position: int) -> int:
        """Returns the place of a position: the samples that are trained on before it."""
        before = ((first, min(end, position)) for first, end in self.ranges if first < position)
        return position - sum(end - first for first, end in before)

    def position_of(self, place: int) -> int:
        """Returns the position of the sample that is trained on after `place` others."""
        for first, end in self.ranges:
            if place < first:
                break
            place += end - first
        return place

    def spans(self, places: range) -> list[range]:
        """Returns the positions of consecutive places, cut into ranges where some are skipped."""
        spans = []
        start = self.position_of(places.start)
        left = len(places)
        for first, end in self.ranges:
            if left and start < first < start + left:
                spans.append(range(start, first))
                left -= first - start
                start = end
        return [*spans, range(start, start + left)] if left else spans


def _checked(pair: Sequence[Any]) -> tuple[int, int]:
    first, end = pair
    if type(first) is not int or type(end) is not int or not 0 <= first < end:
        raise ValueError(f"[{first}, {end}] is not a range of positions")
    return first, end


NO_SKIPS = SkipRanges()
