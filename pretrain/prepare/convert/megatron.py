"""Megatron-LM (and GPT-NeoX, Megatron-DeepSpeed): tokens in NAME.bin, where documents lie in NAME.idx.

A document is one or more sequences (sentences), one after another in the .bin. Layout: see megatron_index.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pretrain.errors import ConfigError, DataError
from pretrain.prepare.convert.cut import Chunk, cut_documents
from pretrain.prepare.convert.files import find_files
from pretrain.prepare.convert.megatron_index import COPY, map_index
from pretrain.prepare.convert.token_file import ReadOptions, read_chunks
from pretrain.prepare.inputs.local import stat_local
from pretrain.prepare.sources import InputFile


@dataclass(frozen=True, slots=True)
class MegatronFile:
    """A TokenFile that is a pair of .bin and .idx.

    Attributes:
        file: The .bin.
        companions: The .idx.
        dtype: Of the tokens.
        options: How it is read.
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
