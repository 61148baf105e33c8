"""Documents as shards have them, many at once, so that what is done with them costs little a document.

Ragged           arrays one after another, and how long each is
TokenDocuments   tokens; of pairs their sources, of records what is learned, of labelled documents the labels
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Ragged(NamedTuple):
    """Arrays one after another.

    Attributes:
        values: 1-D, of all arrays.
        lengths: int64, one an array.
    """

    values: np.ndarray
    lengths: np.ndarray

    def slice(self, start: int, stop: int) -> "Ragged":
        """Returns the arrays from `start` up to `stop`. A view."""
        lengths = self.lengths[start:stop]
        begin = int(self.lengths[:start].sum())
        return Ragged(self.values[begin : begin + int(lengths.sum())], lengths)

    def select(self, is_kept: np.ndarray) -> "Ragged":
        """Returns the arrays that are kept, by a bool for each."""
        return Ragged(self.values[np.repeat(is_kept, self.lengths)], self.lengths[is_kept])

    def join(self, is_last: np.ndarray) -> "Ragged":
        """Returns arrays of several: by a bool for each, whether it is the last of its own; the last of all is one."""
        return Ragged(self.values, np.diff(np.cumsum(self.lengths)[is_last], prepend=0))

    def count_up_to(self, size: int) -> int:
        """Returns how many of the first arrays hold `size` values together; all, if they do not."""
        return min(int(np.searchsorted(np.cumsum(self.lengths), size)) + 1, len(self.lengths))


def concatenate(parts: list[Ragged]) -> Ragged:
    """Returns the arrays of all parts, of which there is one at least."""
    if len(parts) == 1:
        return parts[0]
    return Ragged(np.concatenate([part.values for part in parts]), np.concatenate([part.lengths for part in parts]))


def ragged_of(arrays: Sequence[np.ndarray]) -> Ragged:
    """Returns arrays, at least one, as one."""
    return Ragged(arrays[0] if len(arrays) == 1 else np.concatenate(arrays), np.array([len(one) for one in arrays]))


class TokenDocuments(NamedTuple):
    """Documents of one split and kind.

    Attributes:
        tokens: Of each, its end included.
        source: Pairs: of the other side of each.
        loss: Records: bool or uint8, for each value of `tokens`: whether it is learned.
        labels: Labelled texts: integers, for each value of `tokens`: the number of its label, or IGNORE_INDEX.
    """

    tokens: Ragged
    source: Ragged | None = None
    loss: np.ndarray | None = None
    labels: np.ndarray | None = None

    @property
    def num_documents(self) -> int:
        """How many."""
        return len(self.tokens.lengths)

    def slice(self, start: int, stop: int) -> "TokenDocuments":
        """Returns the documents from `start` up to `stop`. A view."""
        return TokenDocuments(
            self.tokens.slice(start, stop),
            None if self.source is None else self.source.slice(start, stop),
            None if self.loss is None else Ragged(self.loss, self.tokens.lengths).slice(start, stop).values,
            None if self.labels is None else Ragged(self.labels, self.tokens.lengths).slice(start, stop).values,
        )

    def select(self, is_kept: np.ndarray) -> "TokenDocuments":
        """Returns the documents that are kept, by a bool for each."""
        return TokenDocuments(
            self.tokens.select(is_kept),
            None if self.source is None else self.source.select(is_kept),
            None if self.loss is None else Ragged(self.loss, self.tokens.lengths).select(is_kept).values,
            None if self.labels is None else Ragged(self.labels, self.tokens.lengths).select(is_kept).values,
        )
