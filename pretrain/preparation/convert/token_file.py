"""The interface of a format of another system: files of tokens in order, and their documents.

    find_files                    files, folders and globs of this machine, in a fixed order
    TokenFile.tokens()            all tokens, in order, in chunks
    TokenFile.documents(a, b)     the documents that begin in bytes [a, b) of the file, whole

The documents of slices that partition a file are, one after another, its tokens. A document ends
with its file. `check_tokens` gives tokens the dtype of the shards, and checks all of them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from pretrain.errors import ConfigError, DataError
from pretrain.preparation.input_parts import InputFile
from pretrain.preparation.inputs.local_files import find_local
from pretrain.shards.writer import MAX_DOCUMENT_TOKENS
from pretrain.tokenizer.roles import token_dtype
from pretrain.utils.remote import is_remote, without_secrets

# Tokens that are read at once, which bounds memory, with one document and one member.
CHUNK_TOKENS = 2**20
TOKEN_DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")

# Position of the first token, tokens, and positions in ascending order where one document ends and
# the next begins, from the first token to the end of the chunk. Position 0 is not among them.
Chunk = tuple[int, np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of a format's reader."""

    vocab_size: int  # every token is below it
    eos_id: int  # ends, or starts, a document where the format has no table of documents
    dtype: str | None = None  # of tokens whose file has none; None: that of the format's own tools

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in TOKEN_DTYPES:
            raise ConfigError(
                f"dtype={self.dtype!r} is not one of tokens",
                fix=f"use one of {', '.join(TOKEN_DTYPES)}",
            )

    @property
    def shard_dtype(self) -> np.dtype:
        """Data type of tokens in the shards."""
        return np.dtype(token_dtype(self.vocab_size)).newbyteorder("<")

    def check_dtype(self, found: str, where: str, source: str = "header") -> None:
        """Refuses a file that says another dtype than the options. Raises: DataError."""
        if self.dtype not in (None, found):
            raise DataError(
                f"its {source} says {found}, not {self.dtype}",
                where=where,
                fix="leave out --dtype",
            )


class TokenFile(Protocol):
    """One file of tokens, whose headers and size are checked."""

    @property
    def file(self) -> InputFile:
        """The file, as it is cut into slices."""

    @property
    def companions(self) -> tuple[InputFile, ...]:
        """Further files that the output depends on, such as an index."""

    def tokens(self) -> Iterator[np.ndarray]:
        """Yields all tokens in order, in 1-D chunks. Raises: DataError."""

    def documents(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yields the documents whose first byte lies in [start, stop); one may be empty."""


@dataclass(frozen=True, slots=True)
class TokenArray:
    """A TokenFile that is one array, up to the end of the file."""

    file: InputFile
    dtype: np.dtype
    options: ReadOptions
    cuts: Callable[[np.ndarray, int], np.ndarray]  # see `Chunk`
    offset: int = 0  # bytes before the array
    lookback: int = 1  # tokens before a document that show its beginning
    companions: tuple[InputFile, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Length of the array."""
        return (self.file.size - self.offset) // self.dtype.itemsize

    def tokens(self) -> Iterator[np.ndarray]:
        """Yields all tokens in order, in chunks."""
        for _, tokens in self._read(0):
            yield tokens

    def documents(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yields the documents whose first byte lies in [start, stop) of the file."""
        first = self._token_at(start)
        chunks = (
            (position, tokens, self.cuts(tokens, position))
            for position, tokens in self._read(max(first - self.lookback, 0))
        )
        yield from cut_documents(chunks, first, self._token_at(stop), self.file.path)

    def _token_at(self, byte: int) -> int:
        """Returns the first token that begins at `byte` or later."""
        return min(max(-(-(byte - self.offset) // self.dtype.itemsize), 0), self.num_tokens)

    def _read(self, first: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (position, tokens) from token `first` on. Raises: DataError, OSError."""
        path = self.file.path
        with open_named(path) as stream:
            stream.seek(self.offset + first * self.dtype.itemsize)
            for position in range(first, self.num_tokens, CHUNK_TOKENS):
                num_bytes = min(CHUNK_TOKENS, self.num_tokens - position) * self.dtype.itemsize
                data = stream.read(num_bytes)
                if len(data) < num_bytes:
                    raise DataError("truncated while it was read", where=path, fix="copy the file again")
                tokens = np.frombuffer(data, self.dtype)
                yield position, check_tokens(tokens, position, self.options, path)


def find_files(sources: Sequence[str], suffix: str) -> list[Path]:
    """Returns the files that end in `suffix`, each once, sorted within a folder or glob."""
    paths: dict[str, None] = {}
    for source in sources:
        if is_remote(source):
            raise DataError(
                "token data are read from local files only",
                where=without_secrets(source),
                fix="copy them first",
            )
        files = [path for path in find_local(source) if path.endswith(suffix)]
        if not files and Path(source).is_file():
            raise DataError(
                f"not a *{suffix}",
                where=source,
                fix=f"give files that end in {suffix}, or their folder",
            )
        if not files:
            raise DataError(f"holds no *{suffix}", where=source, fix="correct the path of --input")
        paths.update(dict.fromkeys(files))
    return [Path(path) for path in paths]


def check_tokens(tokens: np.ndarray, position: int, options: ReadOptions, where: str) -> np.ndarray:
    """Returns 1-D integers in the dtype of the shards; the first one is at `position`.

    Raises:
        DataError: A token is negative or not below the size of the vocabulary; names the first.
    """
    if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= options.vocab_size):
        bad = int(np.flatnonzero((tokens < 0) | (tokens >= options.vocab_size))[0])
        named = f"token {tokens[bad]} at position {position + bad}"
        raise DataError(
            f"{named} is not below the vocabulary size, {options.vocab_size}",
            where=where,
            fix="give the --tokenizer that made these tokens, or their --dtype",
        )
    return tokens.astype(options.shard_dtype)


@contextmanager
def open_named(path: str) -> Iterator[BinaryIO]:
    """Opens a file; an OSError of a read, which has no file name, gets `path`."""
    try:
        with open(path, "rb") as stream:  # noqa: PTH123 -- InputFile.path is a string
            yield stream
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise


def read_head(path: str, num_bytes: int) -> bytes:
    """Returns the first bytes of a file, or all. Raises: OSError, with its name."""
    with open_named(path) as stream:
        return stream.read(num_bytes)


def cut_documents(chunks: Iterable[Chunk], first: int, last: int, where: str) -> Iterator[np.ndarray]:
    """Yields the documents that begin at positions [first, last); `where` is for errors.

    The chunks go from a position at or before `first`, past every boundary before `first`, to the
    end of the file; no more are taken than are needed.

    Raises:
        DataError: A document is larger than a shard can contain.
    """
    if first >= last:
        return
    pending: list[np.ndarray] = []
    num_pending = 0
    is_begun = first == 0
    for position, tokens, cuts in chunks:
        taken = 0
        for cut in (cuts - position).tolist():
            if is_begun:
                yield np.concatenate([*pending, tokens[taken:cut]])
            pending = []
            num_pending = 0
            taken = cut
            is_begun = True
            if position + cut >= last:
                return
        if is_begun:
            pending.append(tokens[taken:])
            num_pending += len(tokens) - taken
        elif position + len(tokens) >= last:
            return
        if num_pending > MAX_DOCUMENT_TOKENS:
            end = position + len(tokens)
            raise DataError(
                f"no end of a document in {MAX_DOCUMENT_TOKENS} tokens before position {end}",
                where=where,
                fix="give the tokenizer whose end-of-document token separates them",
            )
    if num_pending:
        yield np.concatenate(pending)


def find_cuts(tokens: np.ndarray, position: int, eos_id: int, at_start: bool) -> np.ndarray:
    """Returns where documents begin in a chunk: after each `eos_id`, or `at_start` at it; not 0."""
    cuts = np.flatnonzero(tokens == eos_id) + position + (not at_start)
    return cuts[1:] if len(cuts) and cuts[0] == 0 else cuts
