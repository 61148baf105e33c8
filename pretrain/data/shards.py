"""One token shard: a webdataset tar of whole documents, and the table of offsets that makes it random access.

    ShardWriter.add_document -> member buffer -> at the first document end at or past member_tokens:
        00000007.tokens.npy   1-D uint16 or uint32, the documents one after another
        00000007.docs.npy     1-D uint32, where each document starts in the member; the first is 0
        pairs only:   00000007.source.npy, 00000007.source_docs.npy: the same of the source side
        records only: 00000007.loss.npy: uint8, 1 where a token is learned
    ShardWriter.close        -> the sidecars (sidecars.py), then the tar under its final name
    ShardReader.member(i)    -> views into the mapped tar, their CRC32s checked once; source(i), loss(i) likewise

Any webdataset user can read the tars; ours never parses them: the table says where each array's bytes are. The bytes
of a shard are a pure function of its documents. Deliberately not here: text, tokenizers, and the order of anything.
"""

import hashlib
import mmap
import os
import tarfile
import threading
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from pretrain.data.remote.store import UnavailableError
from pretrain.data.sidecars import LENGTHS_SUFFIX, TABLE_SUFFIX, load_renewed, load_table, npy_bytes, npy_header
from pretrain.errors import DataError, DiskError
from pretrain.index import LENGTH_COLUMNS, NPY_HEADER_BYTES, ShardIndex, Sidecar
from pretrain.io import AtomicWriter, write_file

MEMBER_TOKENS = 2**18
MAX_DOCUMENT_TOKENS = 2**30
TAR_BLOCK = tarfile.BLOCKSIZE

_T = TypeVar("_T")

RAGGED = ("offset", "length", "docs_offset", "num_docs", "crc32", "docs_crc32")
"""Six columns of the table (int64) for tokens and their documents; six more for the source of pairs, two more (offset,
CRC32) for what is learned of records. Offsets are bytes, from the start of the tar to an array's data past its header.
"""


def tar_header(name: str, num_bytes: int) -> bytes:
    """Returns the 512-byte ustar header of a regular file, without time, owner or anything else that varies."""
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = num_bytes, 0, 0o444
    return info.tobuf(tarfile.USTAR_FORMAT)


class ShardWriter:
    """Writes one shard; nothing appears under its name, nor those of its sidecars, before `close`.

    Memory: one member, and the length of every document. A document is never split between members.
    """

    def __init__(self, path: Path, dtype: str, member_tokens: int = MEMBER_TOKENS, kind: str = "text") -> None:
        """Starts a shard.

        Args:
            path: DIR/SPLIT/NAME.tar; its folder exists. The last two parts become the name in the index.
            dtype: `uint16` or `uint32`.
            member_tokens: A member is closed at the first document end at or past this many tokens.
            kind: What a document is: `text`, `pairs` or `records`.

        Raises:
            DiskError: Also from every method.
        """
        assert path.suffix == ".tar" and 1 <= member_tokens <= MAX_DOCUMENT_TOKENS
        self.path, self.member_tokens = path, member_tokens
        self.num_tokens = self.num_documents = 0
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._kind = kind
        self._tokens, self._source, self._loss = _Column(self._dtype), _Column(self._dtype), _Column(np.dtype("u1"))
        self._rows: list[tuple[int, ...]] = []
        self._lengths = array("I")
        self._offset = 0
        self._sha256 = hashlib.sha256()
        self._tar = AtomicWriter(path)

    def add_document(
        self, tokens: np.ndarray, *, source: np.ndarray | None = None, loss: np.ndarray | None = None
    ) -> None:
        """Appends one document.

        Args:
            tokens: 1-D, at least one, any integer dtype; the values must fit the shard's dtype. Copied.
            source: Pairs: the same of the source side.
            loss: Records: bool or uint8, as long as `tokens`: whether each is learned.

        Raises:
            DataError: The document has more than MAX_DOCUMENT_TOKENS tokens.
        """
        assert tokens.ndim == 1 and len(tokens), "a document is 1-D and has at least its end-of-document token"
        if len(tokens) > MAX_DOCUMENT_TOKENS:
            raise DataError(
                f"document {self.num_documents} has {len(tokens)} tokens, more than {MAX_DOCUMENT_TOKENS}",
                where=str(self.path),
                fix="split it in the source text",
            )
        assert (source is not None, loss is not None) == (self._kind == "pairs", self._kind == "records")
        self._tokens.add(tokens)
        self._lengths.append(len(tokens))
        if source is not None:
            assert source.ndim == 1 and len(source), "a source is 1-D and has at least one token"
            self._source.add(source)
            self._lengths.append(len(source))
        if loss is not None:
            assert len(loss) == len(tokens), "each token is learned or not"
            self._loss.add(loss)
        self.num_tokens += len(tokens)
        self.num_documents += 1
        if max(self._tokens.size, self._source.size) >= self.member_tokens:
            self._flush_member()

    def close(self) -> ShardIndex:
        """Writes the rest and the sidecars, and commits the tar. Returns its entry for the index."""
        assert self.num_documents, "a shard has at least one document"
        if self._tokens.size:
            self._flush_member()
        # Two zero blocks end a tar; readers expect whole records of 20 blocks.
        end = self._offset + 2 * TAR_BLOCK
        self._write(bytes(2 * TAR_BLOCK + -end % tarfile.RECORDSIZE))
        try:
            table = self._write_sidecar(TABLE_SUFFIX, np.array(self._rows, dtype="<i8"))
            lengths = np.array(self._lengths, dtype="<u4").reshape(-1, LENGTH_COLUMNS[self._kind])
            lengths_sidecar = self._write_sidecar(LENGTHS_SUFFIX, lengths)
        except DiskError:
            self.discard()
            raise
        self._tar.commit()
        return ShardIndex(
            name=f"{self.path.parent.name}/{self.path.name}",
            num_bytes=self._offset,
            sha256=self._sha256.hexdigest(),
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            num_members=len(self._rows),
            table=table,
            lengths=lengths_sidecar,
        )

    def discard(self) -> None:
        """Gives the shard up and removes what was written."""
        self._tar.discard()

    def _write_sidecar(self, suffix: str, values: np.ndarray) -> Sidecar:
        content = npy_bytes(values)
        path = self.path.with_suffix(suffix)
        write_file(path, content)
        return Sidecar(f"{path.parent.name}/{path.name}", zlib.crc32(content), values.shape[1])

    def _flush_member(self) -> None:
        key = f"{len(self._rows):08d}"
        row = self._write_ragged(f"{key}.tokens.npy", f"{key}.docs.npy", self._tokens)
        if self._kind == "pairs":
            row += self._write_ragged(f"{key}.source.npy", f"{key}.source_docs.npy", self._source)
        if self._kind == "records":
            row += self._write_array(f"{key}.loss.npy", self._loss.take()[0])
        self._rows.append(row)

    def _write_ragged(self, name: str, docs_name: str, column: "_Column") -> tuple[int, ...]:
        """Writes the documents of a column and where they start; returns their columns of the table."""
        values, starts = column.take()
        offset, crc32 = self._write_array(name, values)
        docs_offset, docs_crc32 = self._write_array(docs_name, starts)
        return offset, len(values), docs_offset, len(starts), crc32, docs_crc32

    def _write_array(self, name: str, array: np.ndarray) -> tuple[int, int]:
        """Writes one tar entry; returns where its data starts and the CRC32 of the data."""
        data = array.tobytes()
        size = NPY_HEADER_BYTES + len(data)
        self._write(tar_header(name, size) + npy_header(array.dtype, array.shape))
        offset = self._offset
        self._write(data)
        self._write(bytes(-size % TAR_BLOCK))
        return offset, zlib.crc32(data)

    def _write(self, piece: bytes) -> None:
        self._tar.write(piece)
        self._sha256.update(piece)
        self._offset += len(piece)


class _Column:
    """Arrays of documents, one after another, until a member is full."""

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype, self.size = dtype, 0
        self._arrays: list[np.ndarray] = []
        self._starts: list[int] = []

    def add(self, values: np.ndarray) -> None:
        """Appends a copy. The values must fit the dtype."""
        limits = np.iinfo(self._dtype)
        assert limits.min <= values.min() and values.max() <= limits.max, f"a token does not fit {self._dtype}"
        self._starts.append(self.size)
        self._arrays.append(values.astype(self._dtype))
        self.size += len(values)

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns all values and where each array starts (uint32), and is empty again."""
        values, starts = np.concatenate(self._arrays), np.array(self._starts, dtype="<u4")
        self._arrays, self._starts, self.size = [], [], 0
        return values, starts


class ShardReader:
    """Random access to the arrays of one shard, mapped into memory, without a copy.

    A member's CRC32s are checked the first time it is asked for; after that a call is one look-up. What is damaged is
    renewed once, where it can be. Safe to use from several threads. A mapping lives as long as the reader or any view
    that it handed out.
    """

    def __init__(
        self, folder: Path, shard: ShardIndex, dtype: str, renew: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Opens a shard.

        Args:
            folder: The shard folder.
            shard: Its entry in the index.
            dtype: Of its tokens.
            renew: Replaces a damaged file, by name, if it can; returns whether it did (`ShardStore.renew`).

        Raises:
            DataError: The tar or its table is missing, has another size, or the table is damaged.
        """
        self.name = shard.name
        self._folder, self._shard, self._renew, self._is_renewed = folder, shard, renew, False
        self._lock = threading.Lock()
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._map = _map_file(folder / shard.name, shard.num_bytes)
        table = load_renewed(lambda: load_table(folder, shard, self._dtype.itemsize), renew, shard.table.name)
        self._rows: list[list[int]] = table.tolist()
        self._members: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._sources: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._losses: dict[int, np.ndarray] = {}
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
        """Returns which tokens of a member are learned (uint8), in a shard of records. Raises: DataError: Damaged."""
        array = self._losses.get(number)
        if array is None:
            array = self._losses[number] = self._intact(lambda mapped: self._learned(mapped, number))
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

    def _learned(self, mapped: mmap.mmap, number: int) -> np.ndarray:
        offset, crc32 = self._rows[number][len(RAGGED) :]
        array = np.frombuffer(mapped, "u1", self._rows[number][1], offset)
        self._verify(f"{number:08d}.loss.npy", array, offset, crc32)
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
