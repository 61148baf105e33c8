"""Random access to token shards, whose format is in writer.py.

ShardSet.reader(n)         -> ShardReader of a split's shard, a few hundred kept open
ShardSet.lengths(n, side)  -> tokens of each of its documents: from a sidecar, without the shard
ShardReader.member(i)      -> views into the mapped tar, their CRC32s checked once; source(i),
                              loss(i), labels(i) too
ShardReader.image(i)       -> a view of the file of an image, its CRC32 checked once, and its label
ShardSet.captions(n)       -> the tokens of the captions of a shard's images, from a sidecar
ShardReader.locate(n)      -> member, offset and length of document n
a wrong CRC32              -> the file is renewed once, where it came through a cache; else an error
"""

import mmap
import os
import tarfile
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
from pretrain.kinds.layout import BESIDE_COLUMNS, IMAGE_COLUMNS, SOURCE_COLUMNS
from pretrain.shards.index import DataIndex, ShardIndex, Sidecar
from pretrain.shards.ragged import RaggedArrays
from pretrain.shards.store import LocalStore, ShardStore, UnavailableError
from pretrain.shards.writer import LABEL_DTYPE, RAGGED, TAR_BLOCK, npy_header

_T = TypeVar("_T")

MAX_OPEN_SHARDS = 256

_FIX = "copy this file again or run `pretrain prepare` again"


class ShardReader:
    """Random access to the arrays of one shard, mapped into memory, without a copy.

    A member's CRC32s are checked at its first use; after that a call is one look-up. A damaged file
    is renewed once, where it can be. Thread-safe. A mapping lives as long as the reader or any view
    of it.
    """

    def __init__(
        self, folder: Path, shard: ShardIndex, dtype: str, renew: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Opens a shard, whose damaged files `renew` replaces by name (`ShardStore.renew`).

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
        token_bytes = self._dtype.itemsize
        table = _load_renewed(lambda: load_table(folder, shard, token_bytes), renew, shard.table.name)
        self._rows: list[list[int]] = table.tolist()
        self._members: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._sources: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._beside: dict[int, np.ndarray] = {}
        self._intact_images = bytearray(len(table))  # 1: its CRC32 was checked
        tokens, documents = _counts(table)
        # Position of each member's first token in the shard.
        self.member_starts: list[int] = (np.cumsum(tokens) - tokens).tolist()
        self._first_documents: list[int] = (np.cumsum(documents) - documents).tolist()

    def member(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns a member's tokens and document starts (uint32), read-only views. Raises: DataError."""
        arrays = self._members.get(number)
        if arrays is None:
            arrays = self._intact(lambda mapped: self._ragged(mapped, number, 0, "tokens", "docs"))
            self._members[number] = arrays
        return arrays

    def source(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the same of a member's source side, in a shard of pairs. Raises: DataError."""
        arrays = self._sources.get(number)
        if arrays is None:
            first = len(RAGGED)
            arrays = self._intact(lambda mapped: self._ragged(mapped, number, first, "source", "source_docs"))
            self._sources[number] = arrays
        return arrays

    def locate(self, document: int, side: str = "tokens") -> tuple[int, int, int]:
        """Returns member, first token in it, and length of a document. Raises: DataError."""
        member = bisect_right(self._first_documents, document) - 1
        place = document - self._first_documents[member]
        values, starts = self.source(member) if side == "source" else self.member(member)
        first = int(starts[place])
        end = int(starts[place + 1]) if place + 1 < len(starts) else len(values)
        return member, first, end - first

    def loss(self, number: int) -> np.ndarray:
        """Returns the loss mask of a member (uint8), as written. Raises: DataError."""
        return self._beside_tokens(number, "loss", "u1")

    def labels(self, number: int) -> np.ndarray:
        """Returns the labels of a member's tokens (int16). Raises: DataError."""
        return self._beside_tokens(number, "labels", LABEL_DTYPE)

    def _beside_tokens(self, number: int, name: str, dtype: str) -> np.ndarray:
        if number not in self._beside:
            self._beside[number] = self._intact(lambda mapped: self._parallel(mapped, number, name, dtype))
        return self._beside[number]

    def image(self, number: int) -> tuple[memoryview, int]:
        """Returns the file of an image, and the number of its label. Raises: DataError."""
        offset, size, crc32, label = self._rows[number]

        def read(mapped: mmap.mmap) -> memoryview:
            content = memoryview(mapped)[offset : offset + size]
            if not self._intact_images[number]:
                if zlib.crc32(content) != crc32:
                    raise self._damage(self.image_name(number), size, offset)
                self._intact_images[number] = 1
            return content

        return self._intact(read), label

    def image_name(self, number: int) -> str:
        """Returns the name of an image in the tar, by its header: in tars of others it is no number."""
        offset = self._rows[number][0]
        try:
            return tarfile.TarInfo.frombuf(self._map[offset - TAR_BLOCK : offset], "utf-8", "replace").name
        except tarfile.HeaderError:
            return f"image {number:08d}"

    def _intact(self, read: Callable[[mmap.mmap], _T]) -> _T:
        """Reads the mapped file; if that is damaged, the file that replaces it."""
        mapped = self._map
        try:
            return read(mapped)
        except DataError:
            if not self._replace(mapped):
                raise
        return read(self._map)

    def _replace(self, damaged: mmap.mmap) -> bool:
        """Maps a renewed file instead of the damaged one; returns whether there is one."""
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
        row = self._rows[number][first : first + len(RAGGED)]
        offset, length, docs_offset, num_docs, crc32, docs_crc32 = row
        values = np.frombuffer(mapped, self._dtype, length, offset)
        docs = np.frombuffer(mapped, "<u4", num_docs, docs_offset)
        self._verify(f"{number:08d}.{name}.npy", values, offset, crc32)
        self._verify(f"{number:08d}.{docs_name}.npy", docs, docs_offset, docs_crc32)
        return values, docs

    def _verify(self, name: str, array: np.ndarray, offset: int, crc32: int) -> None:
        if zlib.crc32(array.data) != crc32:
            raise self._damage(name, array.nbytes, offset)

    def _damage(self, name: str, num_bytes: int, offset: int) -> DataError:
        return DataError(
            f"{name} is damaged: CRC32 of the {num_bytes} bytes at byte {offset} does not match",
            where=self.name,
            fix=_FIX,
        )


def _map_file(path: Path, num_bytes: int) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != num_bytes:
                raise DataError(f"has {size} bytes, the index says {num_bytes}", where=str(path), fix=_FIX)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", where=str(path), fix=_FIX) from None


class ShardSet:
    """The shards of a split, by number, opened at their first use. Thread-safe.

    At most `max_open_shards` files stay mapped; each also has a file descriptor.

    Raises:
        DataError: There is no such split, or it is empty.
    """

    def __init__(
        self, folder: Path | ShardStore, index: DataIndex, split: str, max_open_shards: int = MAX_OPEN_SHARDS
    ) -> None:
        self.store = LocalStore(folder) if isinstance(folder, Path) else folder
        self.name = split
        self.folder = self.store.folder
        self.index = index
        self.split = index.split(split)
        if not self.split.num_tokens:
            raise DataError(
                f"split {split!r} has no tokens",
                where=str(self.folder),
                fix="give `pretrain prepare` more text",
            )
        open_shards = lru_cache(max_open_shards)(self._open)
        self.reader: Callable[[int], ShardReader] = open_shards
        self.store.on_pressure(open_shards.cache_clear)
        self._lengths: Callable[[int], np.ndarray] = lru_cache(max_open_shards)(self._load_lengths)
        self.captions: Callable[[int], RaggedArrays] = lru_cache(max_open_shards)(self._load_captions)

    def __len__(self) -> int:
        return len(self.split.shards)

    def lengths(self, number: int, side: str = "tokens") -> np.ndarray:
        """Returns the tokens of each document, uint32, without the shard. Raises: DataError."""
        return self._lengths(number)[:, int(side == "source")]

    def sizes(self, number: int) -> np.ndarray:
        """Returns width and height of each image, uint32 [images, 2], without the shard. Raises: DataError."""
        return self._lengths(number)[:, 1:]

    def _open(self, number: int) -> ShardReader:
        shard = self.split.shards[number]
        self.store.path(shard.name)
        try:
            reader = ShardReader(self.folder, shard, self.index.dtype, self.store.renew)
        except BaseException:
            self.store.release(shard.name)
            raise
        # A reader may be freed anywhere; at exit, the process ends all locks.
        finalize(reader, self.store.release, shard.name).atexit = False
        return reader

    def _load_lengths(self, number: int) -> np.ndarray:
        shard = self.split.shards[number]
        self.store.sidecar(shard.lengths.name)
        name = shard.lengths.name
        return _load_renewed(lambda: load_lengths(self.folder, shard), self.store.renew, name)

    def _load_captions(self, number: int) -> RaggedArrays:
        """Returns the tokens of each caption of a shard, without the shard. Raises: DataError."""
        shard = self.split.shards[number]
        assert shard.captions is not None, "a shard of captions"
        name = shard.captions.name
        self.store.sidecar(name)
        return _load_renewed(lambda: load_captions(self.folder, shard), self.store.renew, name)


def load_table(folder: Path, shard: ShardIndex, token_bytes: int) -> np.ndarray:
    """Reads the table of a shard, int64 [members, columns]. Raises: DataError."""
    table = _load(folder, shard.table, np.dtype("<i8"), shard.num_members)
    if shard.table.num_columns == IMAGE_COLUMNS:
        ends = table[:, 0] + table[:, 1]
    else:
        ends = _ends_of_tokens(table, shard, token_bytes)
    counts = (shard.num_tokens, shard.num_documents)
    is_outside = (table < 0).any() or (ends > shard.num_bytes).any()
    if is_outside or tuple(int(one.sum()) for one in _counts(table)) != counts:
        raise _contradiction(folder / shard.table.name, "offsets or counts")
    return table


def _counts(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens and the documents of each member, int64; an image is one of both."""
    if table.shape[1] == IMAGE_COLUMNS:
        ones = np.ones(len(table), dtype=np.int64)
        return ones, ones
    return table[:, 1], table[:, 3]


def _ends_of_tokens(table: np.ndarray, shard: ShardIndex, token_bytes: int) -> np.ndarray:
    """Returns the end of the last array of each member, int64."""
    ends = np.maximum(table[:, 0] + table[:, 1] * token_bytes, table[:, 2] + table[:, 3] * 4)
    if shard.table.num_columns == SOURCE_COLUMNS:
        ends = np.maximum(ends, table[:, 6] + table[:, 7] * token_bytes)
        ends = np.maximum(ends, table[:, 8] + table[:, 9] * 4)
    if shard.table.num_columns == BESIDE_COLUMNS:
        ends = np.maximum(ends, table[:, 6] + table[:, 1])
    return ends


def load_lengths(folder: Path, shard: ShardIndex) -> np.ndarray:
    """Reads the lengths of a shard's documents, uint32 [documents, sides]. Raises: DataError."""
    lengths = _load(folder, shard.lengths, np.dtype("<u4"), shard.num_documents)
    if not lengths.all() or int(lengths[:, 0].sum(dtype=np.int64)) != shard.num_tokens:
        raise _contradiction(folder / shard.lengths.name, "lengths")
    return lengths


def load_captions(folder: Path, shard: ShardIndex) -> RaggedArrays:
    """Reads the captions of a shard's images, uint32. Raises: DataError."""
    assert shard.captions is not None, "a shard of captions"
    values = _load(folder, shard.captions, np.dtype("<u4"), 1)[0]
    bounds, tokens = values[: shard.num_documents + 1], values[shard.num_documents + 1 :]
    lengths = np.diff(bounds.astype(np.int64))
    if bounds[0] or len(lengths) < shard.num_documents or (lengths < 1).any() or bounds[-1] != len(tokens):
        raise _contradiction(folder / shard.captions.name, "bounds")
    return RaggedArrays(tokens, lengths)


def _load_renewed(load: Callable[[], _T], renew: Callable[[str], bool], name: str) -> _T:
    """Calls `load`; of a damaged file, once more after it was renewed. Raises: DataError."""
    try:
        return load()
    except DataError:
        if not renew(name):
            raise
    return load()


def _load(folder: Path, sidecar: Sidecar, dtype: np.dtype, num_rows: int) -> np.ndarray:
    path = folder / sidecar.name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path), fix=_FIX) from None
    header = npy_header(dtype, (num_rows, sidecar.num_columns))
    if zlib.crc32(content) != sidecar.crc32 or not content.startswith(header):
        raise DataError("its CRC32 or its shape differs from the index", where=str(path), fix=_FIX)
    return np.frombuffer(content, dtype, offset=len(header)).reshape(-1, sidecar.num_columns)


def _contradiction(path: Path, what: str) -> DataError:
    return DataError(f"its {what} contradict the index", where=str(path), fix=_FIX)
