"""What lies beside a tar, as npy arrays: the table of its members, and the lengths of its documents.

    NAME.idx.npy       int64 [members, columns]: where each member's arrays are, and their CRC32s (shards.py)
    NAME.lengths.npy   uint32 [documents, 1]: tokens of each document; of pairs, [documents, 2], of target and source

With them it is known which documents go into which row before a single tar is there.
"""

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pretrain.errors import DataError
from pretrain.shards.index import NPY_HEADER_BYTES, TABLE_COLUMNS, ShardIndex, Sidecar

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
