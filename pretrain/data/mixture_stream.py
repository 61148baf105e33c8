"""The samples of a mixture: each position of the run belongs to a source, and is some position of that source.

    positions  --MixtureOrder-->  for each source a run of its own positions  -->  its stream reads them
    rows of all sources, put back in the order of the positions; sample ids carry the source in their top bits

Sources are streams of one kind, tokenizer and row length. Holds no state. Not here: weights (mixture.py).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from pretrain.data.mixture import MixtureOrder
from pretrain.rows import PairRows, TokenRows

SOURCE_BITS = 12
"""Bits of a sample id that tell its source, below the sign: up to 4,096 sources of 2**51 samples each."""


class Source(Protocol):
    """A stream that a mixture can draw from."""

    def read(self, positions: range) -> TokenRows | PairRows:
        """Reads the samples at some positions."""


class MixtureStream:
    """Draws from several streams."""

    def __init__(self, sources: Sequence[Source], order: MixtureOrder) -> None:
        assert 1 <= len(sources) <= 1 << SOURCE_BITS
        self._sources, self.order = sources, order

    def read(self, positions: range) -> TokenRows | PairRows:
        """Reads the samples at some ascending positions of the run, one apart.

        Raises:
            DataError: A shard of a source is missing or damaged.
        """
        assert positions.step == 1
        sources, places = self.order.pick(positions)
        parts, order = [], []
        for source in np.unique(sources).tolist():
            (rows,) = np.nonzero(sources == source)
            # Consecutive positions of the run hold consecutive samples of each source.
            first, last = int(places[rows[0]]), int(places[rows[-1]])
            parts.append(_with_source(self._sources[source].read(range(first, last + 1)), source))
            order.append(rows)
        return merge_rows(parts, np.concatenate(order))


def source_of(sample_ids: np.ndarray) -> np.ndarray:
    """Returns the source of each sample of a mixture, int64."""
    return sample_ids >> (63 - SOURCE_BITS)


def _with_source(rows: TokenRows | PairRows, source: int) -> TokenRows | PairRows:
    if isinstance(rows, PairRows):
        return PairRows(_numbered(rows.source, source), _numbered(rows.target, source))
    return _numbered(rows, source)


def _numbered(rows: TokenRows, source: int) -> TokenRows:
    ids = rows.sample_ids + (source << (63 - SOURCE_BITS))
    return replace(rows, sample_ids=ids)


def merge_rows(parts: Sequence[TokenRows | PairRows], places: np.ndarray) -> TokenRows | PairRows:
    """Puts the rows of all parts, one after another, at `places`, int64 [rows of all parts]."""
    pairs = [part for part in parts if isinstance(part, PairRows)]
    if pairs:
        assert len(pairs) == len(parts), "sources of one mixture are of one kind"
        source = _merge_side([part.source for part in pairs], places)
        return PairRows(source, _merge_side([part.target for part in pairs], places))
    return _merge_side([part for part in parts if isinstance(part, TokenRows)], places)


def _merge_side(parts: list[TokenRows], places: np.ndarray) -> TokenRows:
    tokens = np.concatenate([part.tokens for part in parts])
    width = tokens.shape[1]
    first_rows = np.cumsum([0, *(len(part.tokens) for part in parts[:-1])])
    starts = np.concatenate([part.starts + first * width for part, first in zip(parts, first_rows, strict=True)])
    row, column = np.divmod(starts, width)
    back = np.argsort(places)

    def gather(arrays: list[np.ndarray | None]) -> np.ndarray | None:
        found = [array for array in arrays if array is not None]
        assert len(found) in (0, len(arrays)), "sources of one mixture are packed alike"
        return np.concatenate(found)[back] if found else None

    num_tokens = [part.num_tokens for part in parts]
    if any(numbers is not None for numbers in num_tokens):
        # A part with a row that was skipped tells them; one that is whole need not.
        whole = [np.full(len(part.tokens), width) for part in parts]
        num_tokens = [every if numbers is None else numbers for numbers, every in zip(num_tokens, whole, strict=True)]
    return TokenRows(
        tokens=tokens[back],
        starts=np.sort(places[row] * width + column),
        num_tokens=gather(num_tokens),
        sample_ids=np.concatenate([part.sample_ids for part in parts])[back],
        learned=gather([part.learned for part in parts]),
        labels=gather([part.labels for part in parts]),
    )
