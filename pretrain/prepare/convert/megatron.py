"""Megatron-LM (and GPT-NeoX, Megatron-DeepSpeed): tokens in NAME.bin, sequences and documents in NAME.idx.

    MMIDIDX 0 0 | version 1, u64 | dtype code, u8 | sequences S, u64 | documents D + 1, u64
    lengths, int32 [S], in tokens | pointers, int64 [S], in bytes | documents, int64 [D + 1], in sequences

Little-endian; layout as in megatron/core/datasets/indexed_dataset.py. A document is one or
more sequences (sentences), one after another in the .bin. The arrays are mapped: an index may exceed the memory.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pretrain.errors import ConfigError, DataError
from pretrain.prepare.convert.token_file import Chunk, ReadOptions, cut_documents, find_files, naming, read_chunks
from pretrain.prepare.input_parts import InputFile
from pretrain.prepare.inputs.local_files import stat_local

MAGIC = b"MMIDIDX\0\0"

HEADER_BYTES = 34

DTYPE_OF_CODE = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}

FLOAT_CODES = (6, 7)

CHECK_SEQUENCES = 2**20

COPY = "copy NAME.bin and NAME.idx of one dataset again"


@dataclass(frozen=True, slots=True)
class MegatronIndex:
    """An index, mapped.

    Attributes:
        path: Path of the .idx.
        dtype: Data type of the tokens.
        lengths: int32 [S]: tokens of each sequence.
        pointers: int64 [S]: byte offset of each sequence.
        document_starts: int64 [D + 1]: the first sequence of each document, and S.
    """

    path: Path
    dtype: np.dtype
    lengths: np.ndarray
    pointers: np.ndarray
    document_starts: np.ndarray

    def cuts(self, position: int, length: int, document: int) -> tuple[np.ndarray, int]:
        """Returns where documents end in (position, position + length], in tokens, an empty one where the last one did.

        Args:
            position: Position of the first token.
            length: Number of tokens.
            document: No document before this number ends past `position`.

        Returns:
            The ends, int64, ascending; and the number of the first document that ends later.
        """
        numbers = range(len(self.document_starts) - 1)
        begin = bisect_right(numbers, position, document, key=self._end)
        stop = bisect_right(numbers, position + length, begin, key=self._end)
        return self._ends(np.asarray(self.document_starts[begin + 1 : stop + 1])), stop

    def _end(self, document: int) -> int:
        return int(self._ends(np.asarray(self.document_starts[document + 1 : document + 2]))[0])

    def _ends(self, sequences: np.ndarray) -> np.ndarray:
        """The tokens at which the sequences before these end; S may be among them."""
        before = np.maximum(sequences - 1, 0)
        ends = self.pointers[before] // self.dtype.itemsize + self.lengths[before]
        return np.where(sequences > 0, ends, 0)

    def check_sequences(self) -> int:
        """Checks that each sequence begins where the one before it ends.

        Returns:
            The bytes of the .bin.

        Raises:
            DataError: One does not; names the first.
        """
        end, where = 0, str(self.path)
        for first in range(0, len(self.lengths), CHECK_SEQUENCES):
            lengths = self.lengths[first : first + CHECK_SEQUENCES].astype(np.int64)
            if (lengths < 0).any():
                bad = first + int(np.flatnonzero(lengths < 0)[0])
                raise DataError(f"sequence {bad} has the length {self.lengths[bad]}", where=where, fix=COPY)
            ends = end + np.cumsum(lengths) * self.dtype.itemsize
            begins = ends - lengths * self.dtype.itemsize
            wrong = np.flatnonzero(self.pointers[first : first + CHECK_SEQUENCES] != begins)
            if len(wrong):
                bad = first + int(wrong[0])
                what = f"sequence {bad} is at byte {self.pointers[bad]}, not where the one before it ends"
                raise DataError(what, where=where, fix=COPY)
            end = int(ends[-1])
        return end

    def check_documents(self) -> None:
        """Checks that documents are runs of sequences, in order, that take up all. Raises: DataError."""
        starts, where, before = self.document_starts, str(self.path), 0
        if not len(starts) or starts[0] != 0 or starts[-1] != len(self.lengths):
            what = f"its {len(starts)} document entries do not go from 0 to the {len(self.lengths)} sequences"
            raise DataError(what, where=where, fix=COPY)
        for first in range(0, len(starts), CHECK_SEQUENCES):
            steps = np.diff(starts[first : first + CHECK_SEQUENCES], prepend=before)
            if (steps < 0).any():
                bad = first + int(np.flatnonzero(steps < 0)[0])
                raise DataError(f"document {bad} begins before the one before it", where=where, fix=COPY)
            before = starts[min(first + CHECK_SEQUENCES, len(starts)) - 1]


def map_index(path: Path) -> MegatronIndex:
    """Maps an .idx, of which the header and the size are checked.

    Raises:
        DataError: It is not one, truncated, multimodal, or not of tokens.
        OSError: With its name.
    """
    where = str(path)
    with naming(path), path.open("rb") as stream:
        header = stream.read(HEADER_BYTES)
    if header[: len(MAGIC)] != MAGIC:
        found = header[: len(MAGIC)]
        raise DataError(f"wrong magic {found!r}: no index of Megatron", where=where, fix="give files of its mmap kind")
    if len(header) < HEADER_BYTES:
        raise DataError(f"truncated: its header has {len(header)} of {HEADER_BYTES} bytes", where=where, fix=COPY)
    version, code = int.from_bytes(header[9:17], "little"), header[17]
    num_sequences, num_starts = int.from_bytes(header[18:26], "little"), int.from_bytes(header[26:34], "little")
    if version != 1:
        raise DataError(f"version {version} is not known", where=where, fix="give files of version 1")
    name = DTYPE_OF_CODE.get(code)
    if name is None or code in FLOAT_CODES:
        what = f"dtype code {code} ({name or 'unknown'}) is not one of tokens"
        raise DataError(what, where=where, fix="give a dataset of integer tokens")
    raw = np.memmap(path, np.uint8, "r")
    expected = HEADER_BYTES + 12 * num_sequences + 8 * num_starts
    if num_sequences and len(raw) == expected + num_sequences:
        raise DataError("has a mode of every sequence: multimodal", where=where, fix="give files of text only")
    if len(raw) != expected:
        what = f"has {len(raw)} bytes, but {num_sequences} sequences and {num_starts} document entries are {expected}"
        raise DataError(what, where=where, fix=COPY)
    lengths, pointers, starts = np.split(raw[HEADER_BYTES:], [4 * num_sequences, 12 * num_sequences])
    dtype = np.dtype(name).newbyteorder("<")
    return MegatronIndex(path, dtype, lengths.view("<i4"), pointers.view("<i8"), starts.view("<i8"))


@dataclass(frozen=True, slots=True)
class MegatronFile:
    """A TokenFile that is a pair of .bin and .idx.

    Attributes:
        file: File of the tokens, .bin.
        companions: File of the index, .idx.
        dtype: Data type of the tokens.
        options: Options of the reader.
    """

    file: InputFile
    companions: tuple[InputFile, ...]
    dtype: np.dtype
    options: ReadOptions

    def tokens(self) -> Iterator[np.ndarray]:
        """Yields all tokens in order, in chunks."""
        for _, tokens in self._read(0):
            yield tokens

    def documents(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yields the documents whose first byte lies in [start, stop) of the .bin; an empty one where there is one."""
        first, last = -(-start // self.dtype.itemsize), -(-stop // self.dtype.itemsize)
        yield from cut_documents(self._chunks(max(first - 1, 0)), first, last, self.file.path)

    def _read(self, first: int) -> Iterator[tuple[int, np.ndarray]]:
        num_tokens = self.file.size // self.dtype.itemsize
        return read_chunks(Path(self.file.path), self.dtype, 0, first, num_tokens, self.options)

    def _chunks(self, first: int) -> Iterator[Chunk]:
        index, document = map_index(Path(self.companions[0].path)), 0
        for position, tokens in self._read(first):
            cuts, document = index.cuts(position, len(tokens), document)
            yield position, tokens, cuts


def open_megatron(sources: Sequence[str], options: ReadOptions) -> list[MegatronFile]:
    """Opens the pairs that `sources` name: NAME, NAME.bin, NAME.idx, folders and globs. Reads their indexes once.

    Raises:
        ConfigError: Other boundaries than the index has.
        DataError: A pair that is missing, damaged, or does not match.
    """
    if options.boundaries != "auto":
        what = f"boundaries={options.boundaries!r} does not go with megatron, whose index has them"
        raise ConfigError(what, fix="leave it out")
    return [_open(path, options) for path in find_files([_index_of(source) for source in sources], ".idx")]


def _index_of(source: str) -> str:
    """Returns the .idx of a NAME or a NAME.bin; anything else as it is."""
    if source.endswith(".bin"):
        return source.removesuffix(".bin") + ".idx"
    is_name = not Path(source).exists() and Path(source + ".idx").exists()
    return source + ".idx" if is_name else source


def _open(path: Path, options: ReadOptions) -> MegatronFile:
    index = map_index(path)
    if options.dtype not in (None, index.dtype.name):
        what = f"its header says {index.dtype.name}, not {options.dtype}"
        raise DataError(what, where=str(path), fix="leave the dtype out")
    bin_path = path.with_suffix(".bin")
    if not bin_path.exists():
        raise DataError(f"there is no {bin_path.name} beside it", where=str(path), fix=COPY)
    file = replace(stat_local(bin_path), is_cuttable=True)
    expected = index.check_sequences()
    index.check_documents()
    if file.size != expected:
        what = "truncated, or of another dataset" if file.size < expected else "of another dataset"
        raise DataError(f"{what}: has {file.size} bytes, its index says {expected}", where=file.path, fix=COPY)
    return MegatronFile(file, (stat_local(path),), index.dtype, options)
