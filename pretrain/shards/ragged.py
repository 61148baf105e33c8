"""Documents of a shard, many at once, so that an operation on them costs little a document.

RaggedArrays     arrays one after another, and their lengths
TokenDocuments   tokens, and by their kind the sources of pairs, a loss mask, or labels
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class RaggedArrays(NamedTuple):
    """Arrays one after another.

    Attributes:
        values: 1-D, of all arrays.
        lengths: int64, one an array.
    """

    values: np.ndarray
    lengths: np.ndarray

    def slice(self, start: int, stop: int) -> "RaggedArrays":
        """Returns the arrays from `start` up to `stop`. A view."""
        lengths = self.lengths[start:stop]
        begin = int(self.lengths[:start].sum())
        return RaggedArrays(self.values[begin : begin + int(lengths.sum())], lengths)

    def select(self, is_kept: np.ndarray) -> "RaggedArrays":
        """Returns the arrays that are kept, by a bool for each."""
        return RaggedArrays(self.values[np.repeat(is_kept, self.lengths)], self.lengths[is_kept])

    def cut(self, most: int) -> "RaggedArrays":
        """Returns the first values of each array, at most so many."""
        starts = np.cumsum(self.lengths) - self.lengths
        places = np.arange(len(self.values)) - np.repeat(starts, self.lengths)
        return RaggedArrays(self.values[places < most], np.minimum(self.lengths, most))

    def join(self, is_last: np.ndarray) -> "RaggedArrays":
        """Joins arrays: a bool for each, True for the last of its group, and for the last of all."""
        return RaggedArrays(self.values, np.diff(np.cumsum(self.lengths)[is_last], prepend=0))

    def count_up_to(self, size: int) -> int:
        """Returns how many of the first arrays have `size` values together; all, if they do not."""
        return min(int(np.searchsorted(np.cumsum(self.lengths), size)) + 1, len(self.lengths))


def concatenate(parts: list[RaggedArrays]) -> RaggedArrays:
    """Returns the arrays of all parts, of which there is one at least."""
    if len(parts) == 1:
        return parts[0]
    values = np.concatenate([part.values for part in parts])
    return RaggedArrays(values, np.concatenate([part.lengths for part in parts]))


def ragged_of(arrays: Sequence[np.ndarray]) -> RaggedArrays:
    """Returns arrays, at least one, as one."""
    values = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return RaggedArrays(values, np.array([len(one) for one in arrays]))


class TokenDocuments(NamedTuple):
    """Documents of one split and kind.

    Attributes:
        tokens: Tokens of each document, its end included.
        source: Pairs: tokens of the other side of each.
        loss: Records: loss mask, bool or uint8 for each value of `tokens`.
        labels: Labelled texts: number of its label, or IGNORE_INDEX, for each value of `tokens`.
    """

    tokens: RaggedArrays
    source: RaggedArrays | None = None
    loss: np.ndarray | None = None
    labels: np.ndarray | None = None

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.tokens.lengths)

    def slice(self, start: int, stop: int) -> "TokenDocuments":
        """Returns the documents from `start` up to `stop`. A view."""
        return self._map(lambda arrays: arrays.slice(start, stop))

    def select(self, is_kept: np.ndarray) -> "TokenDocuments":
        """Returns the documents that are kept, by a bool for each."""
        return self._map(lambda arrays: arrays.select(is_kept))

    def _map(self, change: Callable[[RaggedArrays], RaggedArrays]) -> "TokenDocuments":
        source = None if self.source is None else change(self.source)
        # The arrays of values for each token change as the tokens do.
        beside = [
            None if values is None else change(RaggedArrays(values, self.tokens.lengths)).values
            for values in (self.loss, self.labels)
        ]
        return TokenDocuments(change(self.tokens), source, *beside)
