"""One array of tokens in a file, after a header or none: documents begin after an end-of-document token, or at it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pretrain.errors import ConfigError, DataError
from pretrain.prepare.convert.token_file import (
    TOKEN_DTYPES,
    Chunk,
    ReadOptions,
    cut_documents,
    find_cuts,
    find_files,
    naming,
    read_chunks,
)
from pretrain.prepare.input_parts import InputFile
from pretrain.prepare.inputs.local_files import stat_local
from pretrain.tokenizer import token_dtype

PROBE_TOKENS = 4096

MIN_PROBE_HALVES = 64
"""Fewer are no evidence of a dtype."""


@dataclass(frozen=True, slots=True)
class FlatFile:
    """A TokenFile that is one array.

    Attributes:
        file: File of the array.
        dtype: Data type of the array.
        offset: Byte at which it begins.
        num_tokens: Length of the array.
        at_start: True: a document begins at `eos_id`, not after it.
        options: Options of the reader.
    """

    file: InputFile
    dtype: np.dtype
    offset: int
    num_tokens: int
    at_start: bool
    options: ReadOptions
    companions: tuple[InputFile, ...] = ()

    def tokens(self) -> Iterator[np.ndarray]:
        """Yields all tokens in order, in chunks."""
        for _, tokens in self._read(0):
            yield tokens

    def documents(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yields the documents whose first byte lies in [start, stop) of the file."""
        first, last = self._token(start), self._token(stop)
        # A token before `first` that ends a document is what makes the next one begin there.
        begin = first if self.at_start else max(first - 1, 0)
        yield from cut_documents(self._chunks(begin), first, last, self.file.path)

    def _token(self, byte: int) -> int:
        """The first token that begins at `byte` or later."""
        return min(max(-(-(byte - self.offset) // self.dtype.itemsize), 0), self.num_tokens)

    def _read(self, first: int) -> Iterator[tuple[int, np.ndarray]]:
        return read_chunks(Path(self.file.path), self.dtype, self.offset, first, self.num_tokens, self.options)

    def _chunks(self, first: int) -> Iterator[Chunk]:
        for position, tokens in self._read(first):
            yield position, tokens, find_cuts(tokens, position, self.options.eos_id, self.at_start)


def open_flat(
    file: InputFile, dtype: str, options: ReadOptions, *, offset: int = 0, at_start: bool = False
) -> FlatFile:
    """Returns the array that fills a file from byte `offset` on.

    Args:
        file: File of the array.
        dtype: Data type of its tokens.
        options: Options of the reader; `boundaries` other than `auto` override `at_start`.
        offset: Bytes of the header.
        at_start: Meaning of `boundaries=auto`: True: a document begins at `eos_id`.

    Raises:
        ConfigError: Boundaries of samples.
        DataError: It is no whole number of tokens.
    """
    token_dtype = np.dtype(dtype).newbyteorder("<")
    num_bytes = file.size - offset
    if num_bytes < 0 or num_bytes % token_dtype.itemsize:
        raise DataError(
            f"truncated, or not of {dtype}: its {num_bytes} bytes of tokens are no whole number of them",
            where=file.path,
            fix="copy the file again, or give the dtype of its tokens",
        )
    if options.boundaries == "sample":
        raise ConfigError("boundaries='sample' does not go with a format that has none", fix="use end or start")
    if options.boundaries != "auto":
        at_start = options.boundaries == "start"
    num_tokens = num_bytes // token_dtype.itemsize
    return FlatFile(replace(file, is_cuttable=True), token_dtype, offset, num_tokens, at_start, options)


def refuse_wider(file: InputFile, options: ReadOptions) -> None:
    """Refuses a file, read as uint16 by default, whose tokens are 32 bits wide.

    Read as uint16 they would all be in the vocabulary, every second one being the zero of the upper half.

    Raises:
        DataError: It is such a file.
    """
    path = Path(file.path)
    with naming(path), path.open("rb") as stream:
        data = stream.read(2 * PROBE_TOKENS)
    halves = np.frombuffer(data[: len(data) // 4 * 4], "<u2")
    largest_upper = (options.vocab_size - 1) >> 16
    if (
        len(halves) >= MIN_PROBE_HALVES
        and (halves[1::2] <= largest_upper).all()
        and (halves[0::2] > largest_upper).any()
    ):
        raise DataError(
            "its tokens look 32 bits wide: the upper half of every one is empty",
            where=file.path,
            fix="give their dtype: uint32, or uint16 if that is what they are",
        )


# nanoGPT, llm.c and modded-nanogpt: one `.bin` of tokens a file.
#
#     nanoGPT              uint16 from the first byte on; the end-of-document token closes a document
#     llm.c, modded       256 int32 of header (magic, version, number of tokens), then uint16 or uint32; the
#                          end-of-document token opens a document
#
# Layout as written by nanoGPT's data/*/prepare.py and llm.c's dev/data/data_common.py.


HEADER_BYTES = 1024

DTYPE_OF_MAGIC = {(20240520, 1): "uint16", (20240801, 7): "uint32"}

MAGICS = {magic for magic, _ in DTYPE_OF_MAGIC}

EVALUATION_MAGIC = 20240522


def open_nanogpt(sources: Sequence[str], options: ReadOptions) -> list[FlatFile]:
    """Opens the `.bin` files that `sources` name. Raises: DataError."""
    return [_open_nanogpt(stat_local(path), options) for path in find_files(sources, ".bin")]


def _open_nanogpt(file: InputFile, options: ReadOptions) -> FlatFile:
    path = Path(file.path)
    with naming(path), path.open("rb") as stream:
        data = stream.read(HEADER_BYTES)
    magic = int.from_bytes(data[:4], "little")
    if magic == EVALUATION_MAGIC:
        raise DataError("holds questions of an evaluation, not text", where=file.path, fix="leave the file out")
    if magic in MAGICS:
        return _open_with_header(file, data, options)
    if options.dtype is None:
        refuse_wider(file, options)
    return open_flat(file, options.dtype or "uint16", options)


def _open_with_header(file: InputFile, data: bytes, options: ReadOptions) -> FlatFile:
    if len(data) < HEADER_BYTES:
        raise DataError(f"truncated: its header has {len(data)} of 1024 bytes", where=file.path, fix="copy it again")
    magic, version, num_tokens = np.frombuffer(data, "<i4")[:3].tolist()
    dtype = DTYPE_OF_MAGIC.get((magic, version))
    if dtype is None:
        known = ", ".join(f"version {v} of magic {m}" for m, v in DTYPE_OF_MAGIC)
        raise DataError(f"version {version} of magic {magic} is not known", where=file.path, fix=f"give one of {known}")
    if options.dtype not in (None, dtype):
        raise DataError(f"its header says {dtype}, not {options.dtype}", where=file.path, fix="leave the dtype out")
    expected = HEADER_BYTES + num_tokens * np.dtype(dtype).itemsize
    if file.size != expected:
        raise DataError(
            f"has {file.size} bytes, but {num_tokens} tokens as its header says are {expected}",
            where=file.path,
            fix="copy the file again",
        )
    return open_flat(file, dtype, options, offset=HEADER_BYTES, at_start=True)


# OLMo and Dolma: `.npy` files that are an array without a header (numpy memmaps), or, accepted too,
# true `.npy` files.
#
# The end-of-document token closes a document. A file without a header does not say its dtype: it is
# taken for the smaller of uint16 and uint32 that holds the vocabulary, as OLMo-core does. Layout as
# read by its data/utils.py.


MAGIC = b"\x93NUMPY"


def open_olmo(sources: Sequence[str], options: ReadOptions) -> list[FlatFile]:
    """Opens the `.npy` files that `sources` name. Raises: DataError."""
    return [_open_olmo(stat_local(path), options) for path in find_files(sources, ".npy")]


def _open_olmo(file: InputFile, options: ReadOptions) -> FlatFile:
    path = Path(file.path)
    with naming(path), path.open("rb") as stream:
        has_header = stream.read(len(MAGIC)) == MAGIC
    if has_header:
        return _open_npy(file, options)
    dtype = options.dtype or token_dtype(options.vocab_size)
    if options.dtype is None and dtype == "uint16":
        refuse_wider(file, options)
    return open_flat(file, dtype, options)


def _open_npy(file: InputFile, options: ReadOptions) -> FlatFile:
    path = Path(file.path)
    read_header = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
    try:
        with naming(path), path.open("rb") as stream:
            major, _ = np.lib.format.read_magic(stream)
            shape, _, dtype = read_header[major](stream)
            offset = stream.tell()
    except (ValueError, KeyError) as error:
        raise DataError(f"its header cannot be read: {error}", where=file.path, fix="copy it again") from None
    if len(shape) != 1:
        raise DataError(f"its array has the shape {shape}", where=file.path, fix="give arrays with one axis")
    if dtype.name not in TOKEN_DTYPES or dtype != dtype.newbyteorder("<"):
        raise DataError(
            f"its array is of {dtype.str}, which is not one of tokens",
            where=file.path,
            fix=f"give little-endian arrays of {', '.join(TOKEN_DTYPES)}",
        )
    if options.dtype not in (None, dtype.name):
        raise DataError(
            f"its header says {dtype.name}, not {options.dtype}", where=file.path, fix="leave the dtype out"
        )
    expected = offset + shape[0] * dtype.itemsize
    if file.size != expected:
        what = f"has {file.size} bytes, but {shape[0]} tokens as its header says are {expected}"
        raise DataError(what, where=file.path, fix="copy the file again")
    return open_flat(file, dtype.name, options, offset=offset)
