"""Hashes of rows and tokens that do not depend on the order in which a stream gives them.

    a row      -> CRC32 of its tokens (and loss mask, labels and source), mixed with its sample id
    borders    -> each document start of a row, mixed with the sample id
    a reading  -> sums mod 2**64 over all rows: equal sums, equal multisets of rows

A sum commutes, so the same rows give the same hash on any ranks, at any time. The hashes detect
mistakes, not adversaries.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pretrain.rows import TokenRows
from pretrain.utils.rng import mix64

CHUNK_TOKENS = 1 << 20
"""Tokens that are looked up at once, eight bytes each."""


@dataclass(frozen=True, slots=True)
class RowHashes:
    """Sums over rows, below 2**64: of sample ids; of these with tokens, borders, labels, masks."""

    samples: int = 0
    content: int = 0

    def __add__(self, other: "RowHashes") -> "RowHashes":
        samples = (self.samples + other.samples) % 2**64
        return RowHashes(samples, (self.content + other.content) % 2**64)


def hash_rows(rows: TokenRows) -> RowHashes:
    """Returns the hashes of some rows; about one nanosecond a token."""
    mixed = mix64(rows.sample_ids_B.astype(np.uint64))
    content = 0
    for letter, side in (("s", rows.source), ("t", rows)):
        if side is None:
            continue
        keys = mix64(mixed ^ np.uint64(ord(letter)))
        checks = np.fromiter(map(zlib.crc32, side.tokens_BT), np.uint64, len(keys))
        # The upper half is free: rows have a loss mask or labels, never both.
        for beside in (side.loss_mask_BT, side.labels_BT):
            if beside is not None:
                upper = np.fromiter(map(zlib.crc32, beside), np.uint64, len(keys))
                checks |= upper << np.uint64(32)
        row, column = np.divmod(side.starts, side.tokens_BT.shape[1])
        borders = mix64(keys[row] + column.astype(np.uint64))
        content += int(mix64(keys ^ checks).sum(dtype=np.uint64))
        content += int(borders.sum(dtype=np.uint64))
    return RowHashes(int(mixed.sum(dtype=np.uint64)), content % 2**64)


class TokenSums:
    """Sums of mixed token ids: equal for two sets of tokens with equal counts of each id."""

    def __init__(self, vocab_size: int) -> None:
        self._mixed = mix64(np.arange(vocab_size, dtype=np.uint64))

    def __call__(self, tokens: np.ndarray) -> int:
        """Returns the sum over 1-D tokens, below 2**64; about two nanoseconds a token."""
        return sum(int(self._mixed[part].sum(dtype=np.uint64)) for part in chunks(tokens)) % 2**64


def chunks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    """Yields 1-D tokens in parts of `CHUNK_TOKENS`, which bounds the memory of computations."""
    for first in range(0, len(tokens), CHUNK_TOKENS):
        yield tokens[first : first + CHUNK_TOKENS]
