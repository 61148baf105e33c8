"""Documents as shards have them, many at once, so that what is done with them costs little a document.

Ragged           arrays one after another, and how long each is
TokenDocuments   tokens; of pairs their sources, of records the loss mask, of labelled documents the labels
"""

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretrain.errors import DataError
from pretrain.shards.index import NPY_HEADER_BYTES, TABLE_COLUMNS, ShardIndex, Sidecar


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

    def join(self, is_last: np.ndarray) -> "RaggedArrays":
        """Returns arrays of several: by a bool for each, whether it is the last of its own; the last of all is one."""
        return RaggedArrays(self.values, np.diff(np.cumsum(self.lengths)[is_last], prepend=0))

    def count_up_to(self, size: int) -> int:
        """Returns how many of the first arrays hold `size` values together; all, if they do not."""
        return min(int(np.searchsorted(np.cumsum(self.lengths), size)) + 1, len(self.lengths))


def concatenate(parts: list[RaggedArrays]) -> RaggedArrays:
    """Returns the arrays of all parts, of which there is one at least."""
    if len(parts) == 1:
        return parts[0]
    return RaggedArrays(
        np.concatenate([part.values for part in parts]), np.concatenate([part.lengths for part in parts])
    )


def ragged_of(arrays: Sequence[np.ndarray]) -> RaggedArrays:
    """Returns arrays, at least one, as one."""
    return RaggedArrays(
        arrays[0] if len(arrays) == 1 else np.concatenate(arrays), np.array([len(one) for one in arrays])
    )


class TokenDocuments(NamedTuple):
    """Documents of one split and kind.

    Attributes:
        tokens: Tokens of each document, its end included.
        source: Pairs: tokens of the other side of each.
        loss: Records: loss mask, bool or uint8 for each value of `tokens`.
        labels: Labelled texts: integers, for each value of `tokens`: the number of its label, or IGNORE_INDEX.
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
        return TokenDocuments(
            self.tokens.slice(start, stop),
            None if self.source is None else self.source.slice(start, stop),
            None if self.loss is None else RaggedArrays(self.loss, self.tokens.lengths).slice(start, stop).values,
            None if self.labels is None else RaggedArrays(self.labels, self.tokens.lengths).slice(start, stop).values,
        )

    def select(self, is_kept: np.ndarray) -> "TokenDocuments":
        """Returns the documents that are kept, by a bool for each."""
        return TokenDocuments(
            self.tokens.select(is_kept),
            None if self.source is None else self.source.select(is_kept),
            None if self.loss is None else RaggedArrays(self.loss, self.tokens.lengths).select(is_kept).values,
            None if self.labels is None else RaggedArrays(self.labels, self.tokens.lengths).select(is_kept).values,
        )


# The npy arrays beside a tar: the table of its members, and the lengths of its documents.
#
#     NAME.idx.npy       int64 [members, columns]: where each member's arrays are, and their CRC32s
#     NAME.lengths.npy   uint32 [documents, 1]: tokens of each document; of pairs, [documents, 2], of target and source
#
# They are enough to plan which documents go into which row before any tar is fetched.


TABLE_SUFFIX = ".idx.npy"

LENGTHS_SUFFIX = ".lengths.npy"

_FIX = "copy this file again or run `pretrain prepare` again"


def npy_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Returns an npy 1.0 header of exactly NPY_HEADER_BYTES, the same bytes under every numpy version."""
    text = f"{{'descr': '{dtype.newbyteorder('<').str}', 'fortran_order': False, 'shape': {shape}, }}"
    room = NPY_HEADER_BYTES - 10
    return b"\x93NUMPY\x01\x00" + room.to_bytes(2, "little") + text.ljust(room - 1).encode("ascii") + b"\n"


def npy_bytes(array: np.ndarray) -> bytes:
    """Returns a whole npy file."""
    return npy_header(array.dtype, array.shape) + array.tobytes()


def load_table(folder: Path, shard: ShardIndex, token_bytes: int) -> np.ndarray:
    """Reads the table of a shard, int64 [members, columns], and checks it against the index.

    Raises:
        DataError: It is missing or damaged.
    """
    table = _load(folder, shard.table, np.dtype("<i8"), shard.num_members)
    ends = np.maximum(table[:, 0] + table[:, 1] * token_bytes, table[:, 2] + table[:, 3] * 4)
    if shard.table.num_columns == TABLE_COLUMNS["pairs"]:
        ends = np.maximum(ends, np.maximum(table[:, 6] + table[:, 7] * token_bytes, table[:, 8] + table[:, 9] * 4))
    if shard.table.num_columns == TABLE_COLUMNS["records"]:
        ends = np.maximum(ends, table[:, 6] + table[:, 1])
    counts = (shard.num_tokens, shard.num_documents)
    if (table < 0).any() or (ends > shard.num_bytes).any() or (table[:, 1].sum(), table[:, 3].sum()) != counts:
        raise _contradiction(folder / shard.table.name, "offsets or counts")
    return table


def load_lengths(folder: Path, shard: ShardIndex) -> np.ndarray:
    """Reads the lengths of a shard's documents, uint32 [documents, sides], and checks them against the index.

    Raises:
        DataError: They are missing or damaged.
    """
    lengths = _load(folder, shard.lengths, np.dtype("<u4"), shard.num_documents)
    if not lengths.all() or int(lengths[:, 0].sum(dtype=np.int64)) != shard.num_tokens:
        raise _contradiction(folder / shard.lengths.name, "lengths")
    return lengths


def load_renewed(load: Callable[[], np.ndarray], renew: Callable[[str], bool], name: str) -> np.ndarray:
    """Returns what `load` does; once more after the file that it reads was renewed, where it is damaged.

    Raises:
        DataError: It still is.
    """
    try:
        return load()
    except DataError:
        if not renew(name):
            raise
    return load()


def _load(folder: Path, sidecar: Sidecar, dtype: np.dtype, num_rows: int) -> np.ndarray:
    path = folder / sidecar.name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path), fix=_FIX) from None
    header = npy_header(dtype, (num_rows, sidecar.num_columns))
    if zlib.crc32(content) != sidecar.crc32 or not content.startswith(header):
        raise DataError("its CRC32 or its shape is not what the index says", where=str(path), fix=_FIX)
    return np.frombuffer(content, dtype, offset=len(header)).reshape(-1, sidecar.num_columns)


def _contradiction(path: Path, what: str) -> DataError:
    return DataError(f"its {what} contradict the index", where=str(path), fix=_FIX)
