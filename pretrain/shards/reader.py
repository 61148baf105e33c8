"""Random access to one token shard, whose format is in writer.py.

    ShardReader.member(i)  -> views into the mapped tar, their CRC32s checked once; source(i), loss(i), labels(i) too
    ShardReader.locate(n)  -> member, offset and length of document n
    a CRC32 that is wrong  -> the file is renewed once, where it came through a cache; else an error

The tar is never parsed: the table says where each array's bytes are.
"""

import mmap
import os
import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar
from weakref import finalize

import numpy as np

from pretrain.errors import DataError
from pretrain.shards.index import DataIndex, ShardIndex
from pretrain.shards.sidecars import load_lengths, load_renewed, load_table
from pretrain.shards.store import LocalStore, ShardStore, UnavailableError
from pretrain.shards.writer import LABEL_DTYPE, RAGGED

_T = TypeVar("_T")


class ShardReader:
    """Random access to the arrays of one shard, mapped into memory, without a copy.

    A member's CRC32s are checked the first time it is asked for; after that a call is one look-up.
    What is damaged is renewed once, where it can be. Safe to use from several threads. A mapping
    lives as long as the reader or any view that it handed out.
    """

    def __init__(
        self, folder: Path, shard: ShardIndex, dtype: str, renew: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Opens a shard.

        Args:
            folder: The shard folder.
            shard: Entry of the shard in the index.
            dtype: Type of its tokens.
            renew: Replaces a damaged file, by name, if it can; returns whether it did (`ShardStore.renew`).

        Raises:
            DataError: The tar or its table is missing, has another size, or the table is damaged.
        """
        self.name = shard.name
        self._folder = folder
        self._shard = shard
        self._renew = renew
        self._is_renewed = False
        self._lock = threading.Lock()
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._map = _map_file(folder / shard.name, shard.num_bytes)
        table = load_renewed(lambda: load_table(folder, shard, self._dtype.itemsize), renew, shard.table.name)
        self._rows: list[list[int]] = table.tolist()
        self._members: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._sources: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._beside: dict[int, np.ndarray] = {}
        self.member_starts: list[int] = (np.cumsum(table[:, 1]) - table[:, 1]).tolist()
        """Position of each member's first token in the shard."""
        self._first_documents: list[int] = (np.cumsum(table[:, 3]) - table[:, 3]).tolist()

    def member(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns a member's tokens and where its documents start (uint32): 1-D, read-only views.

        Raises:
            DataError: They are damaged; names shard, member and byte.
        """
        arrays = self._members.get(number)
        if arrays is None:
            arrays = self._intact(lambda mapped: self._ragged(mapped, number, 0, "tokens", "docs"))
            self._members[number] = arrays
        return arrays

    def source(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the same of a member's source side, in a shard of pairs. Raises: DataError: It is damaged."""
        arrays = self._sources.get(number)
        if arrays is None:
            arrays = self._intact(lambda mapped: self._ragged(mapped, number, len(RAGGED), "source", "source_docs"))
            self._sources[number] = arrays
        return arrays

    def locate(self, document: int, side: str = "tokens") -> tuple[int, int, int]:
        """Returns where a document of the shard is on a side: its member, its first token there, its tokens.

        Raises:
            DataError: The member is damaged.
        """
        member = bisect_right(self._first_documents, document) - 1
        place = document - self._first_documents[member]
        values, starts = self.source(member) if side == "source" else self.member(member)
        first = int(starts[place])
        end = int(starts[place + 1]) if place + 1 < len(starts) else len(values)
        return member, first, end - first

    def loss(self, number: int) -> np.ndarray:
        """Returns the loss mask of a member (uint8), in a shard of records. Raises: DataError: Damaged."""
        return self._beside_tokens(number, "loss", "u1")

    def labels(self, number: int) -> np.ndarray:
        """Returns the labels of a member's tokens (int16), in a shard of labelled texts. Raises: DataError: Damaged."""
        return self._beside_tokens(number, "labels", LABEL_DTYPE)

    def _beside_tokens(self, number: int, name: str, dtype: str) -> np.ndarray:
        array = self._beside.get(number)
        if array is None:
            array = self._beside[number] = self._intact(lambda mapped: self._parallel(mapped, number, name, dtype))
        return array

    def _intact(self, read: Callable[[mmap.mmap], _T]) -> _T:
        """Returns what is read of the mapped file; if that is damaged, of the file that came in its place."""
        mapped = self._map
        try:
            return read(mapped)
        except DataError:
            if not self._replace(mapped):
                raise
        return read(self._map)

    def _replace(self, damaged: mmap.mmap) -> bool:
        """Maps another file than the damaged one, if one is to be had; returns whether it did."""
        with self._lock:
            if self._map is not damaged:
                return True  # another thread was faster
            if self._is_renewed:
                return False
            try:
                self._is_renewed = self._renew(self.name)
            except UnavailableError:
                raise
            except DataError:
                self._is_renewed = True  # there is no better one: not asked for again at every row
                raise
            if self._is_renewed:
                self._map = _map_file(self._folder / self.name, self._shard.num_bytes)
            return self._is_renewed

    def _parallel(self, mapped: mmap.mmap, number: int, name: str, dtype: str) -> np.ndarray:
        offset, crc32 = self._rows[number][len(RAGGED) :]
        array = np.frombuffer(mapped, dtype, self._rows[number][1], offset)
        self._verify(f"{number:08d}.{name}.npy", array, offset, crc32)
        return array

    def _ragged(
        self, mapped: mmap.mmap, number: int, first: int, name: str, docs_name: str
    ) -> tuple[np.ndarray, np.ndarray]:
        offset, length, docs_offset, num_docs, crc32, docs_crc32 = self._rows[number][first : first + len(RAGGED)]
        values = np.frombuffer(mapped, self._dtype, length, offset)
        docs = np.frombuffer(mapped, "<u4", num_docs, docs_offset)
        self._verify(f"{number:08d}.{name}.npy", values, offset, crc32)
        self._verify(f"{number:08d}.{docs_name}.npy", docs, docs_offset, docs_crc32)
        return values, docs

    def _verify(self, name: str, array: np.ndarray, offset: int, crc32: int) -> None:
        if zlib.crc32(array.data) != crc32:
            raise DataError(
                f"{name} is damaged: CRC32 of the {array.nbytes} bytes at byte {offset} does not match",
                where=self.name,
                fix="copy this shard again or run `pretrain prepare` again",
            )


def _map_file(path: Path, num_bytes: int) -> mmap.mmap:
    fix = "copy this shard again or run `pretrain prepare` again"
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != num_bytes:
                raise DataError(f"has {size} bytes, the index says {num_bytes}", where=str(path), fix=fix)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", where=str(path), fix=fix) from None


# The shards of one split, opened when they are needed, and how long the documents of each are.
#
# ShardSet.reader(n)           -> ShardReader, a few hundred kept open
# ShardSet.lengths(n, side)    -> tokens of every document of a shard: from a sidecar, without the shard


MAX_OPEN_SHARDS = 256


class ShardSet:
    """The shards of a split, by number. Safe to use from several threads."""

    def __init__(
        self, folder: Path | ShardStore, index: DataIndex, split: str, max_open_shards: int = MAX_OPEN_SHARDS
    ) -> None:
        """Opens nothing yet.

        Args:
            folder: The shard folder, or the store that has it.
            index: Index of the folder.
            split: Name of the split.
            max_open_shards: Mapped files kept; each also holds a file descriptor.

        Raises:
            DataError: There is no such split, or it is empty.
        """
        self.store = LocalStore(folder) if isinstance(folder, Path) else folder
        self.name = split
        self.folder = self.store.folder
        self.index = index
        self.split = index.split(split)
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
