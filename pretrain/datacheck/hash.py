"""Hashes of what a stream gave that do not depend on the order in which it came.

    a row      -> CRC32 of its tokens (and of its loss mask, of labels, and of the source), mixed with its sample id
    borders    -> each document start of a row, mixed with the sample id
    a reading  -> sums mod 2**64 over all rows: equal sums, equal multisets of rows

A sum commutes, so the same rows give the same hash whichever rank read them, and when. They detect mistakes, not
adversaries.
"""

import zlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pretrain.rows import PairRows, TokenRows
from pretrain.utils.rng import mix64

CHUNK_TOKENS = 1 << 20
"""Tokens that are looked up at once, eight bytes each."""

_SIDES = {"target": 0x74, "source": 0x73}


@dataclass(frozen=True, slots=True)
class RowHashes:
    """Sums over some rows.

    Attributes:
        samples: Over the sample ids, below 2**64.
        content: Over sample ids with tokens, borders, labels and loss masks, below 2**64.
    """

    samples: int = 0
    content: int = 0

    def __add__(self, other: "RowHashes") -> "RowHashes":
        return RowHashes((self.samples + other.samples) % 2**64, (self.content + other.content) % 2**64)


def hash_rows(rows: TokenRows | PairRows) -> RowHashes:
    """Returns the hashes of some rows; about one nanosecond a token."""
    sides = {"target": rows.target, "source": rows.source} if isinstance(rows, PairRows) else {"target": rows}
    mixed = mix64(sides["target"].sample_ids.astype(np.uint64))
    content = 0
    for name, side in sides.items():
        keys = mix64(mixed ^ np.uint64(_SIDES[name]))
        checks = np.fromiter(map(zlib.crc32, side.tokens), np.uint64, len(keys))
        if side.loss_mask is not None:
            masks = np.fromiter(map(zlib.crc32, side.loss_mask), np.uint64, len(keys))
            checks |= masks << np.uint64(32)
        if side.labels is not None:
            labels = np.fromiter(map(zlib.crc32, side.labels), np.uint64, len(keys))
            checks |= labels << np.uint64(32)
        row, column = np.divmod(side.starts, side.tokens.shape[1])
        borders = mix64(keys[row] + column.astype(np.uint64))
        content += int(mix64(keys ^ checks).sum(dtype=np.uint64)) + int(borders.sum(dtype=np.uint64))
    return RowHashes(int(mixed.sum(dtype=np.uint64)), content % 2**64)


class TokenSums:
    """Sums of mixed token ids: equal for two sets of tokens that hold each id equally often.

    Args:
        vocab_size: Ids are below it.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    @cached_property
    def _mixed(self) -> np.ndarray:
        return mix64(np.arange(self._vocab_size, dtype=np.uint64))

    def __call__(self, tokens: np.ndarray) -> int:
        """Returns the sum over 1-D tokens, below 2**64; about two nanoseconds a token."""
        parts = (tokens[first : first + CHUNK_TOKENS] for first in range(0, len(tokens), CHUNK_TOKENS))
        return sum(int(self._mixed[part].sum(dtype=np.uint64)) for part in parts) % 2**64
