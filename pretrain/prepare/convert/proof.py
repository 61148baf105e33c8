"""The proof that a conversion lost nothing: one hash of all tokens in the source's order, before and after.

    before    sha256 over the tokens of the files as they are, uint32 little-endian; documents play no part
    after     the same over the shards on disk, dealt back into the source's order, tokens that were appended left out

Without appended tokens and with nothing held out, `after` is the hash of the train shards, one after another.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pretrain.prepare.convert.part import load_runs
from pretrain.prepare.convert.token_file import TokenFile
from pretrain.prepare.part import PartRecord
from pretrain.prepare.sources import Part
from pretrain.shards.index import ShardIndex
from pretrain.shards.shard_reader import ShardReader

Tick = Callable[[int], None]
"""Called with the bytes done since the last call."""


@dataclass(frozen=True, slots=True)
class TokenHash:
    """What tokens come to.

    Attributes:
        num_tokens: How many.
        sha256: Over them in order, uint32 little-endian, in hex.
    """

    num_tokens: int
    sha256: str


def hash_tokens(chunks: Iterable[np.ndarray]) -> TokenHash:
    """Returns the hash of chunks of non-negative integers, however they are cut, whatever their dtype."""
    num_tokens, sha256 = 0, hashlib.sha256()
    for chunk in chunks:
        num_tokens += len(chunk)
        sha256.update(np.ascontiguousarray(chunk, "<u4").data)
    return TokenHash(num_tokens, sha256.hexdigest())


def hash_source(files: Iterable[TokenFile], tick: Tick) -> TokenHash:
    """Reads all files. Raises: DataError, OSError."""

    def read() -> Iterator[np.ndarray]:
        for opened in files:
            yield from opened.tokens()
            tick(opened.file.size)

    return hash_tokens(read())


def hash_shards(
    folder: Path, dtype: str, eos_id: int, parts: Sequence[Part], records: dict[int, PartRecord], tick: Tick
) -> TokenHash:
    """Reads all shards of the parts. Raises: DataError, where one is damaged."""

    def read() -> Iterator[np.ndarray]:
        for part in parts:
            splits = records[part.number].splits
            cursors = {name: _Cursor(folder, dtype, eos_id, split.shards) for name, split in splits.items()}
            for split, is_appended, count in load_runs(folder, part).rows:
                yield from cursors[split].take(count, is_appended)
            tick(part.num_bytes)

    return hash_tokens(read())


class _Cursor:
    """The documents of shards, in order."""

    def __init__(self, folder: Path, dtype: str, eos_id: int, shards: Sequence[ShardIndex]) -> None:
        self._eos_id = eos_id
        self._members = self._read(folder, dtype, shards)
        self._tokens, self._bounds = np.empty(0, dtype), np.zeros(1, np.int64)

    @staticmethod
    def _read(folder: Path, dtype: str, shards: Sequence[ShardIndex]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for shard in shards:
            reader = ShardReader(folder, shard, dtype)
            yield from (reader.member(number) for number in range(shard.num_members))

    def take(self, count: int, is_appended: bool) -> Iterator[np.ndarray]:
        """Yields the tokens of the next `count` documents, without an end-of-document token that was appended."""
        while count:
            if len(self._bounds) == 1:
                self._tokens, starts = next(self._members)
                self._bounds = np.append(starts.astype(np.int64), len(self._tokens))
            taken = min(count, len(self._bounds) - 1)
            bounds = self._bounds[: taken + 1]
            tokens = self._tokens[bounds[0] : bounds[-1]]
            if is_appended:
                ends = bounds[1:] - bounds[0] - 1
                assert (tokens[ends] == self._eos_id).all(), "what was appended is the end of a document"
                tokens = np.delete(tokens, ends)
            yield tokens
            self._bounds, count = self._bounds[taken:], count - taken
