"""Megatron-LM (and GPT-NeoX, Megatron-DeepSpeed): tokens in NAME.bin, sequences and documents in NAME.idx.

    MMIDIDX 0 0 | version 1, u64 | dtype code, u8 | sequences S, u64 | documents D + 1, u64
    lengths, int32 [S], in tokens | pointers, int64 [S], in bytes | documents, int64 [D + 1], in
    sequences

Little-endian; layout as in megatron/core/datasets/indexed_dataset.py. A document is one or more
sequences (sentences), one after another in the .bin. The arrays are mapped: an index may exceed the
memory.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from pretrain.errors import DataError
from pretrain.preparation.convert.token_file import ReadOptions, TokenArray, find_files, read_head
from pretrain.preparation.inputs.local_files import stat_local

MAGIC = b"MMIDIDX\0\0"
HEADER_BYTES = 34
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")
DTYPE_OF_CODE = dict(enumerate(DTYPES, 1))
# Entries that are checked at once.
CHECK_SEQUENCES = 2**20
COPY = "copy NAME.bin and NAME.idx of one dataset again"


@dataclass(frozen=True, slots=True)
class MegatronIndex:
    """An index, mapped."""

    path: str  # of the .idx
    dtype: np.dtype
    lengths: np.ndarray  # int32 [S]: tokens of each sequence
    pointers: np.ndarray  # int64 [S]: byte offset of each sequence
    document_starts: np.ndarray  # int64 [D + 1]: first sequence of each, and S

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """Returns the positions, in tokens, at which the documents [start, stop) end, int64."""
        sequences = np.asarray(self.document_starts[start + 1 : stop + 1])
        before = np.maximum(sequences - 1, 0)
        ends = self.pointers[before] // self.dtype.itemsize + self.lengths[before]
        return np.where(sequences > 0, ends, 0)

    def check_sequences(self) -> int:
        """Checks the order of sequences; returns the bytes of the .bin. Raises: DataError."""
        end = 0
        for first in range(0, len(self.lengths), CHECK_SEQUENCES):
            lengths = self.lengths[first : first + CHECK_SEQUENCES].astype(np.int64)
            if (lengths < 0).any():
                bad = first + int(np.flatnonzero(lengths < 0)[0])
                raise self._damaged(f"sequence {bad} has the length {self.lengths[bad]}")
            ends = end + np.cumsum(lengths) * self.dtype.itemsize
            begins = ends - lengths * self.dtype.itemsize
            wrong = np.flatnonzero(self.pointers[first : first + CHECK_SEQUENCES] != begins)
            if len(wrong):
                bad = first + int(wrong[0])
                place = f"byte {self.pointers[bad]}, not where the one before it ends"
                raise self._damaged(f"sequence {bad} is at {place}")
            end = int(ends[-1])
        return end

    def check_documents(self) -> None:
        """Checks that documents are runs of sequences that cover all. Raises: DataError."""
        starts = self.document_starts
        if not len(starts) or starts[0] != 0 or starts[-1] != len(self.lengths):
            entries = f"its {len(starts)} document entries"
            raise self._damaged(f"{entries} do not go from 0 to the {len(self.lengths)} sequences")
        for first in range(0, len(starts), CHECK_SEQUENCES):
            steps = np.diff(starts[first : first + CHECK_SEQUENCES + 1])
            if (steps < 0).any():
                bad = first + int(np.flatnonzero(steps < 0)[0]) + 1
                raise self._damaged(f"document {bad} begins before the one before it")

    def _damaged(self, what: str) -> DataError:
        return DataError(what, where=self.path, fix=COPY)


def map_index(path: str) -> MegatronIndex:
    """Maps an .idx, of which the header and the size are checked. Raises: DataError, OSError."""
    header = read_head(path, HEADER_BYTES)
    if header[: len(MAGIC)] != MAGIC:
        raise DataError(
            f"wrong magic {header[: len(MAGIC)]!r}: no index of Megatron",
            where=path,
            fix="give files of its mmap kind",
        )
    if len(header) < HEADER_BYTES:
        raise DataError(
            f"truncated: its header has {len(header)} of {HEADER_BYTES} bytes",
            where=path,
            fix=COPY,
        )
    version = int.from_bytes(header[9:17], "little")
    code = header[17]
    num_sequences = int.from_bytes(header[18:26], "little")
    num_starts = int.from_bytes(header[26:34], "little")
    if version != 1:
        raise DataError(f"version {version} is not known", where=path, fix="give files of version 1")
    name = DTYPE_OF_CODE.get(code)
    if name is None or name.startswith("float"):
        raise DataError(
            f"dtype code {code} ({name or 'unknown'}) is not one of tokens",
            where=path,
            fix="give a dataset of integer tokens",
        )
    raw = np.memmap(path, np.uint8, "r")
    expected = HEADER_BYTES + 12 * num_sequences + 8 * num_starts
    if num_sequences and len(raw) == expected + num_sequences:
        raise DataError(
            "has a mode of every sequence: multimodal",
            where=path,
            fix="give files of text only",
        )
    if len(raw) != expected:
        counts = f"{num_sequences} sequences and {num_starts} document entries"
        raise DataError(f"has {len(raw)} bytes, but {counts} are {expected}", where=path, fix=COPY)
    bounds = [4 * num_sequences, 12 * num_sequences]
    lengths, pointers, starts = np.split(raw[HEADER_BYTES:], bounds)
    dtype = np.dtype(name).newbyteorder("<")
    return MegatronIndex(path, dtype, lengths.view("<i4"), pointers.view("<i8"), starts.view("<i8"))


def cuts_of_index(tokens: np.ndarray, position: int, index_path: str) -> np.ndarray:
    """Returns where documents end in (position, position + tokens]; twice where one is empty."""
    # Mapped for each chunk, because a mapping cannot be sent to a worker.
    index = map_index(index_path)
    documents = range(len(index.document_starts) - 1)

    def end_of(document: int) -> int:
        return int(index.document_ends(document, document + 1)[0])

    start = bisect_right(documents, position, key=end_of)
    stop = bisect_right(documents, position + len(tokens), start, key=end_of)
    return index.document_ends(start, stop)


def open_megatron(sources: Sequence[str], options: ReadOptions) -> list[TokenArray]:
    """Opens the pairs that `sources` name: NAME, NAME.bin, NAME.idx, folders and globs."""
    indexes = find_files([_index_of(source) for source in sources], ".idx")
    return [_open_pair(path, options) for path in indexes]


def _index_of(source: str) -> str:
    """Returns the .idx of a NAME or a NAME.bin; anything else as it is."""
    if source.endswith(".bin"):
        return source.removesuffix(".bin") + ".idx"
    is_name = not Path(source).exists() and Path(source + ".idx").exists()
    return source + ".idx" if is_name else source


def _open_pair(path: Path, options: ReadOptions) -> TokenArray:
    index = map_index(str(path))
    options.check_dtype(index.dtype.name, str(path))
    bin_path = path.with_suffix(".bin")
    if not bin_path.exists():
        raise DataError(f"there is no {bin_path.name} in its folder", where=str(path), fix=COPY)
    file = replace(stat_local(bin_path), is_cuttable=True)
    expected = index.check_sequences()
    index.check_documents()
    if file.size != expected:
        kind = "truncated, or of another dataset" if file.size < expected else "of another dataset"
        raise DataError(
            f"{kind}: has {file.size} bytes, its index says {expected}",
            where=file.path,
            fix=COPY,
        )
    cuts = partial(cuts_of_index, index_path=str(path))
    return TokenArray(file, index.dtype, options, cuts, companions=(stat_local(path),))
