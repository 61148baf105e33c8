"""The shards of one split, opened when they are needed, and how long the documents of each are.

ShardSet.reader(n)           -> ShardReader, a few hundred kept open
ShardSet.lengths(n, side)    -> tokens of every document of a shard: from a sidecar, without the shard
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from weakref import finalize

import numpy as np

from pretrain.errors import DataError
from pretrain.shards.index import DataIndex
from pretrain.shards.shard_reader import ShardReader
from pretrain.shards.sidecars import load_lengths, load_renewed
from pretrain.shards.store import LocalStore, ShardStore

MAX_OPEN_SHARDS = 256


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
        self._lengths: Callable[[int], np.ndarray] = lru_cache(max_open_shards)(self._load_lengths)

    def __len__(self) -> int:
        """Returns the number of shards."""
        return len(self.split.shards)

    def lengths(self, number: int, side: str = "tokens") -> np.ndarray:
        """Returns the tokens of each document of a shard on a side, uint32; a remote shard is not fetched for that.

        Raises:
            DataError: They are missing or damaged.
        """
        return self._lengths(number)[:, int(side == "source")]

    def _open(self, number: int) -> ShardReader:
        shard = self.split.shards[number]
        self.store.path(shard.name)
        try:
            reader = ShardReader(self.folder, shard, self.index.dtype, self.store.renew)
        except BaseException:
            self.store.release(shard.name)
            raise
        finalize(reader, self.store.release, shard.name).atexit = False
        return reader

    def _load_lengths(self, number: int) -> np.ndarray:
        shard = self.split.shards[number]
        self.store.sidecar(shard.lengths.name)
        return load_renewed(lambda: load_lengths(self.folder, shard), self.store.renew, shard.lengths.name)
