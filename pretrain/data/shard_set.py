"""The shards of one split, opened when they are needed, and where the documents of each lie.

ShardSet.reader(n)        -> ShardReader, a few hundred kept open
ShardSet.documents(n)     -> DocumentTable: member, offset and length of every document of a shard
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from weakref import finalize

import numpy as np

from pretrain.data.remote.store import LocalStore, ShardStore
from pretrain.data.shards import ShardReader
from pretrain.errors import DataError
from pretrain.index import DataIndex

MAX_OPEN_SHARDS = 256
TABLES_KEPT = 64


@dataclass(frozen=True, slots=True)
class DocumentTable:
    """Where the documents of one shard lie, on one side.

    Attributes:
        member: int64, number of the member that holds it.
        offset: int64, its first token in that member.
        length: int64, its tokens.
    """

    member: np.ndarray
    offset: np.ndarray
    length: np.ndarray


class ShardSet:
    """The shards of a split, by number. Safe to use from several threads."""

    def __init__(
        self, folder: Path | ShardStore, index: DataIndex, split: str, max_open_shards: int = MAX_OPEN_SHARDS
    ) -> None:
        """Opens nothing yet.

        Args:
            folder: The shard folder, or the store that has it.
            index: Its index.
            split: Name of the split.
            max_open_shards: Mapped files kept; each also holds a file descriptor.

        Raises:
            DataError: There is no such split, or it is empty.
        """
        self.store = LocalStore(folder) if isinstance(folder, Path) else folder
        self.name, self.folder, self.index, self.split = split, self.store.folder, index, index.split(split)
        if not self.split.num_tokens:
            raise DataError(
                f"split {split!r} has no tokens", where=str(self.folder), fix="give `pretrain prepare` more text"
            )
        open_shards = lru_cache(max_open_shards)(self._open)
        self.reader: Callable[[int], ShardReader] = open_shards
        self.store.on_pressure(open_shards.cache_clear)
        self.documents: Callable[[int, str], DocumentTable] = lru_cache(TABLES_KEPT)(self._build_table)

    def __len__(self) -> int:
        """Returns the number of shards."""
        return len(self.split.shards)

    def _open(self, number: int) -> ShardReader:
        shard = self.split.shards[number]
        self.store.path(shard.name)
        try:
            reader = ShardReader(self.folder, shard, self.index.dtype)
        except BaseException:
            self.store.release(shard.name)
            raise
        finalize(reader, self.store.release, shard.name).atexit = False
        return reader

    def _build_table(self, number: int, side: str) -> DocumentTable:
        reader = self.reader(number)
        members, offsets, lengths = [], [], []
        for member in range(self.split.shards[number].num_members):
            num_tokens, starts = reader.documents(member, side)
            members.append(np.full(len(starts), member))
            offsets.append(starts.astype(np.int64))
            lengths.append(np.append(starts[1:], num_tokens).astype(np.int64) - offsets[-1])
        return DocumentTable(np.concatenate(members), np.concatenate(offsets), np.concatenate(lengths))
