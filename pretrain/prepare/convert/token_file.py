"""The interface of a format of another system: files of tokens in order, and their documents.

    find_files                    files, folders and globs of this machine, in a fixed order
    TokenFile.tokens()            all tokens, in order, in chunks
    TokenFile.documents(a, b)     the documents that begin in bytes [a, b) of the file, whole

The documents of slices that partition a file are, one after another, its tokens. A document ends with its file. All
tokens pass through `check_tokens`, which gives them the dtype of the shards and checks them against the vocabulary.
"""

import glob
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from pretrain.errors import ConfigError, DataError
from pretrain.prepare.input_parts import InputFile
from pretrain.prepare.inputs.local_files import walk
from pretrain.shards.writer import MAX_DOCUMENT_TOKENS
from pretrain.tokenizer import token_dtype
from pretrain.utils.remote import is_remote, without_secrets


def find_files(sources: Sequence[str], suffix: str) -> list[Path]:
    """Returns the files whose names end in `suffix`: in the order given, sorted within a folder or glob, each once.

    Raises:
        DataError: A URL, no such file, a file named in full that ends in something else, or nothing found.
    """
    found: dict[Path, None] = {}
    for source in sources:
        files = _expand(source, suffix)
        if not files:
            raise DataError(f"holds no *{suffix}", where=source, fix="correct the path")
        found.update(dict.fromkeys(files))
    return list(found)


def _expand(source: str, suffix: str) -> list[Path]:
    if is_remote(source):
        raise DataError(
            "token data are read from local files only", where=without_secrets(source), fix="copy them first"
        )
    path = Path(source)
    if path.is_dir():
        return [file for file in walk(path) if file.name.endswith(suffix)]
    if path.exists():
        if not path.name.endswith(suffix):
            raise DataError(f"not a *{suffix}", where=source, fix=f"give files that end in {suffix}, or their folder")
        return [path]
    if not glob.has_magic(source):
        raise DataError("no such file or folder", where=source, fix="correct the path")
    matches = sorted(glob.glob(source, recursive=True))  # noqa: PTH207 -- Path.glob takes no absolute pattern
    found = [file for match in matches for file in (walk(Path(match)) if Path(match).is_dir() else [Path(match)])]
    return [file for file in found if file.name.endswith(suffix)]


CHUNK_TOKENS = 2**20
"""Tokens that are read at once, which bounds memory, with one document and one member."""

TOKEN_DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")

BOUNDARIES = ("auto", "end", "start", "sample")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of a format's reader.

    Attributes:
        vocab_size: Entries of the tokenizer: every token is below it.
        eos_id: Token that ends, or starts, a document where the format has no table of documents.
        dtype: Data type of tokens whose file has none. None: that of the format's own tools.
        boundaries: Beginning of a document in a format without a table of documents: after `eos_id` (`end`), at it
            (`start`), or every sample (`sample`; mds). `auto`: that of the format's own tools.
        column: Field of a sample with the tokens (mds).
    """

    vocab_size: int
    eos_id: int
    dtype: str | None = None
    boundaries: str = "auto"
    column: str = "tokens"

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in TOKEN_DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} is not one of tokens", fix=f"use one of {', '.join(TOKEN_DTYPES)}")
        if self.boundaries not in BOUNDARIES:
            fix = f"use one of {', '.join(BOUNDARIES)}"
            raise ConfigError(f"boundaries={self.boundaries!r} is not known", fix=fix)
        if not 0 <= self.eos_id < self.vocab_size:
            raise ConfigError(
                f"eos_id={self.eos_id} is not in the vocabulary of {self.vocab_size} entries",
                fix="give the end-of-document token of this tokenizer",
            )

    @property
    def shard_dtype(self) -> np.dtype:
        """Data type of tokens in the shards."""
        return np.dtype(token_dtype(self.vocab_size)).newbyteorder("<")


class TokenFile(Protocol):
    """One file of tokens, checked as far as its headers and its size go."""

    @property
    def file(self) -> InputFile:
        """The file, as it is cut into slices."""

    @property
    def companions(self) -> tuple[InputFile, ...]:
        """Files that say how this one is read: with it, what the output is made from."""

    def tokens(self) -> Iterator[np.ndarray]:
        """Yields all tokens in order, in 1-D chunks. Raises: DataError."""

    def documents(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yields the documents whose first byte lies in [start, stop); one may be empty. Raises: DataError."""


def check_tokens(tokens: np.ndarray, position: int, options: ReadOptions, where: str) -> np.ndarray:
    """Returns 1-D integers in the dtype of the shards; `position` is that of the first one.

    Raises:
        DataError: One is negative or not below the size of the vocabulary; names the first.
    """
    if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= options.vocab_size):
        bad = int(np.flatnonzero((tokens < 0) | (tokens >= options.vocab_size))[0])
        raise DataError(
            f"token {tokens[bad]} at position {position + bad} is not below the vocabulary size, {options.vocab_size}",
            where=where,
            fix="give the tokenizer that made these tokens, and their dtype",
        )
    return tokens.astype(options.shard_dtype)


def read_chunks(
    path: Path, dtype: np.dtype, offset: int, first: int, last: int, options: ReadOptions
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (position, tokens) of tokens [first, last) of an array that begins at byte `offset`, checked.

    Raises:
        DataError: The file ends before; or as `check_tokens`.
        OSError: With the name of the file.
    """
    with naming(path), path.open("rb") as file:
        file.seek(offset + first * dtype.itemsize)
        for position in range(first, last, CHUNK_TOKENS):
            count = min(CHUNK_TOKENS, last - position)
            data = file.read(count * dtype.itemsize)
            if len(data) < count * dtype.itemsize:
                raise DataError("truncated while it was read", where=str(path), fix="copy the file again")
            yield position, check_tokens(np.frombuffer(data, dtype), position, options, str(path))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives an OSError of a read, which has no file name, that of `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


Chunk = tuple[int, np.ndarray, np.ndarray]

"""Position of the first token, tokens, and positions (ascending, in [position, position + length]) where one document
ends and the next begins. Position 0 is not among them, a document begins there anyway."""


def cut_documents(chunks: Iterable[Chunk], first: int, last: int, where: str) -> Iterator[np.ndarray]:
    """Yields the documents that begin in [first, last).

    Args:
        chunks: Consecutive, from a position at or before `first` that is past every boundary before `first`; to the
            end of the file. No more are taken than are needed.
        first: Documents that begin before are others'.
        last: Documents that begin here or later are others'.
        where: File, for messages.

    Raises:
        DataError: A document is larger than a shard can hold.
    """
    if first >= last:
        return
    pending: list[np.ndarray] = []
    num_pending, is_begun = 0, first == 0
    for position, tokens, cuts in chunks:
        taken = 0
        for cut in (cuts - position).tolist():
            if is_begun:
                yield _join([*pending, tokens[taken:cut]])
            pending, num_pending, taken, is_begun = [], 0, cut, True
            if position + cut >= last:
                return
        if is_begun:
            pending.append(tokens[taken:])
            num_pending += len(tokens) - taken
        elif position + len(tokens) >= last:
            return
        if num_pending > MAX_DOCUMENT_TOKENS:
            raise DataError(
                f"no end of a document in {MAX_DOCUMENT_TOKENS} tokens before position {position + len(tokens)}",
                where=where,
                fix="give the token that separates its documents",
            )
    if num_pending:
        yield _join(pending)


def _join(pieces: list[np.ndarray]) -> np.ndarray:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def find_cuts(tokens: np.ndarray, position: int, eos_id: int, at_start: bool) -> np.ndarray:
    """Returns the positions at which documents begin in a chunk: after each `eos_id`, or `at_start` at it; not 0."""
    cuts = np.flatnonzero(tokens == eos_id) + position + (not at_start)
    return cuts[1:] if len(cuts) and cuts[0] == 0 else cuts
