"""One array of tokens in a file, after a header or none: documents begin after an end-of-document token, or at it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pretrain.errors import ConfigError, DataError
from pretrain.prepare.convert.cut import Chunk, cut_documents, find_cuts
from pretrain.prepare.convert.token_file import ReadOptions, naming, read_chunks
from pretrain.prepare.sources import InputFile

PROBE_TOKENS = 4096
MIN_PROBE_HALVES = 64
"""Fewer can be anything."""


@dataclass(frozen=True, slots=True)
class FlatFile:
    """A TokenFile that is one array.

    Attributes:
        file: The file.
        dtype: Of the array.
        offset: Byte at which it begins.
        num_tokens: Its length.
        at_start: A document begins at `eos_id`, not after it.
        options: How it is read.
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
        file: The file.
        dtype: Of its tokens.
        options: How it is read; its `boundaries`, unless `auto`, count for more than `at_start`.
        offset: Bytes of header.
        at_start: What `auto` means here.

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
    """Refuses a file, taken for uint16 without being told, whose tokens are 32 bits wide.

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
