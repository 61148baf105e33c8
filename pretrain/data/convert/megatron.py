"""Megatron-LM (and GPT-NeoX, Megatron-DeepSpeed): tokens in NAME.bin, where sequences and documents lie in NAME.idx.

    NAME.idx    MMIDIDX 0 0 | version 1, u64 | dtype code, u8 | sequences S, u64 | documents D + 1, u64
                lengths, int32 [S], in tokens | pointers, int64 [S], in bytes | documents, int64 [D + 1], in sequences
    NAME.bin    the sequences, one after another

Little-endian; layout as in megatron/core/datasets/indexed_dataset.py. A document is one or more sequences (sentences).
The index is mapped, never held: it is larger than memory before the tokens are many.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pretrain.data.convert.cut import Chunk, cut_documents
from pretrain.data.convert.files import find_files
from pretrain.data.convert.token_file import ReadOptions, naming, read_chunks
from pretrain.data.inputs.local import stat_local
from pretrain.data.sources import InputFile
from pretrain.errors import ConfigError, DataError

MAGIC = b"MMIDIDX\0\0"
HEADER_BYTES = 34
DTYPE_OF_CODE = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
FLOAT_CODES = (6, 7)
CHECK_SEQUENCES = 2**20

_COPY = "copy NAME.bin and NAME.idx of one dataset again"


@dataclass(frozen=True, slots=True)
class MegatronFile:
    """A TokenFile that is a pair of .bin and .idx.

    Attributes:
        file: The .bin.
        companions: The .idx.
        dtype: Of the tokens.
        lengths: int32 [S], mapped.
        pointers: int64 [S], mapped.
        document_starts: int64 [D + 1], mapped: first sequence of each document, and S.
        options: How it is read.
    """

    file: InputFile
    companions: tuple[InputFile, ...]
    dtype: np.dtype
    lengths: np.ndarray
    pointers: np.ndarray
    document_starts: np.ndarray
    options: ReadOptions

    @property
    def num_tokens(self) -> int:
        """Tokens of the .bin."""
        return self.file.size // self.dtype.itemsize

    def tokens(self) -> Iterator[np.ndarray]:
        """Yields all tokens in order, in chunks."""
        for _, tokens in self._read(0):
            yield tokens

    def documents(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yields the documents whose first byte lies in [start, stop) of the .bin; an empty one where there is one."""
        first, last = -(-start // self.dtype.itemsize), -(-stop // self.dtype.itemsize)
        yield from cut_documents(self._chunks(max(first - 1, 0)), first, last, self.file.path)

    def _read(self, first: int) -> Iterator[tuple[int, np.ndarray]]:
        return read_chunks(Path(self.file.path), self.dtype, 0, first, self.num_tokens, self.options)

    def _chunks(self, first: int) -> Iterator[Chunk]:
        documents = range(1, len(self.document_starts))
        begin = bisect_right(documents, first, key=self._position)
        for position, tokens in self._read(first):
            end = bisect_right(documents, position + len(tokens), begin, key=self._position)
            yield position, tokens, self._positions(np.asarray(self.document_starts[begin + 1 : end + 1]))
            begin = end

    def _position(self, document: int) -> int:
        """The token at which a document begins; of D, where the last one ends."""
        return int(self._positions(np.asarray(self.document_starts[document : document + 1]))[0])

    def _positions(self, sequences: np.ndarray) -> np.ndarray:
        """The tokens at which sequences begin: where those before them end, so that S is one of them."""
        before = np.maximum(sequences - 1, 0)
        ends = self.pointers[before] // self.dtype.itemsize + self.lengths[before]
        return np.where(sequences > 0, ends, 0)


def open_megatron(sources: Sequence[str], options: ReadOptions) -> list[MegatronFile]:
    """Opens the pairs that `sources` name: NAME, NAME.bin, NAME.idx, folders and globs.

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
    index, where = stat_local(path), str(path)
    with naming(path), path.open("rb") as stream:
        header = stream.read(HEADER_BYTES)
    if header[: len(MAGIC)] != MAGIC:
        found = header[: len(MAGIC)]
        raise DataError(f"wrong magic {found!r}: no index of Megatron", where=where, fix="give files of its mmap kind")
    if len(header) < HEADER_BYTES:
        raise DataError(f"truncated: its header has {len(header)} of {HEADER_BYTES} bytes", where=where, fix=_COPY)
    version, code = int.from_bytes(header[9:17], "little"), header[17]
    num_sequences, num_starts = int.from_bytes(header[18:26], "little"), int.from_bytes(header[26:34], "little")
    if version != 1:
        raise DataError(f"version {version} is not known", where=where, fix="give files of version 1")
    dtype = _token_dtype(code, options, where)
    expected = HEADER_BYTES + 12 * num_sequences + 8 * num_starts
    if num_sequences and index.size == expected + num_sequences:
        raise DataError("has a mode of every sequence: multimodal", where=where, fix="give files of text only")
    if index.size != expected:
        what = f"has {index.size} bytes, but {num_sequences} sequences and {num_starts} document entries are {expected}"
        raise DataError(what, where=where, fix=_COPY)
    raw = np.memmap(path, np.uint8, "r")[HEADER_BYTES:]
    lengths = raw[: 4 * num_sequences].view("<i4")
    pointers = raw[4 * num_sequences : 12 * num_sequences].view("<i8")
    bin_path = path.with_suffix(".bin")
    if not bin_path.exists():
        raise DataError(f"there is no {bin_path.name} beside it", where=where, fix=_COPY)
    file = replace(stat_local(bin_path), is_cuttable=True)
    starts = raw[12 * num_sequences :].view("<i8")
    opened = MegatronFile(file, (index,), dtype, lengths, pointers, starts, options)
    _check_sequences(opened)
    _check_documents(opened)
    return opened


def _token_dtype(code: int, options: ReadOptions, where: str) -> np.dtype:
    name = DTYPE_OF_CODE.get(code)
    if name is None or code in FLOAT_CODES:
        what = f"dtype code {code} ({name or 'unknown'}) is not one of tokens"
        raise DataError(what, where=where, fix="give a dataset of integer tokens")
    if options.dtype not in (None, name):
        raise DataError(f"its header says {name}, not {options.dtype}", where=where, fix="leave the dtype out")
    return np.dtype(name).newbyteorder("<")


def _check_sequences(opened: MegatronFile) -> None:
    """Checks that the sequences follow one another and fill the .bin. Raises: DataError, naming what does not."""
    where, width = opened.companions[0].path, opened.dtype.itemsize
    end = 0
    for first in range(0, len(opened.lengths), CHECK_SEQUENCES):
        lengths = opened.lengths[first : first + CHECK_SEQUENCES].astype(np.int64)
        if (lengths < 0).any():
            bad = first + int(np.flatnonzero(lengths < 0)[0])
            raise DataError(f"sequence {bad} has the length {opened.lengths[bad]}", where=where, fix=_COPY)
        ends = end + np.cumsum(lengths) * width
        wrong = np.flatnonzero(opened.pointers[first : first + CHECK_SEQUENCES] != ends - lengths * width)
        if len(wrong):
            bad = first + int(wrong[0])
            what = f"sequence {bad} is at byte {opened.pointers[bad]}, not where the one before it ends"
            raise DataError(what, where=where, fix=_COPY)
        end = int(ends[-1])
    if opened.file.size != end:
        kind = "truncated, or of another dataset" if opened.file.size < end else "of another dataset"
        what = f"{kind}: has {opened.file.size} bytes, its index says {end}"
        raise DataError(what, where=opened.file.path, fix=_COPY)


def _check_documents(opened: MegatronFile) -> None:
    """Checks that documents are runs of sequences, in order, that take up all. Raises: DataError."""
    starts, where, before = opened.document_starts, opened.companions[0].path, 0
    if not len(starts) or starts[0] != 0 or starts[-1] != len(opened.lengths):
        what = f"its {len(starts)} document entries do not go from 0 to the {len(opened.lengths)} sequences"
        raise DataError(what, where=where, fix=_COPY)
    for first in range(0, len(starts), CHECK_SEQUENCES):
        piece = np.concatenate([[before], starts[first : first + CHECK_SEQUENCES]])
        if (np.diff(piece) < 0).any():
            bad = first + int(np.flatnonzero(np.diff(piece) < 0)[0])
            raise DataError(f"document {bad} begins before the one before it", where=where, fix=_COPY)
        before = int(piece[-1])
