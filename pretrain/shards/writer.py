"""One token shard: a webdataset tar of whole documents, and tables that make it random access.

    ShardWriter.add -> member buffer -> at the first document end at or past member_tokens:
        00000007.tokens.npy    1-D uint16 or uint32, the documents one after another
        00000007.docs.npy      1-D uint32, where each document starts in the member; the first is 0
        pairs only:    00000007.source.npy, 00000007.source_docs.npy: the same of the source side
        records only:  00000007.loss.npy: uint8, loss mask, 1 where a token is a target; of
                       preferences, 2 is added for the tokens of the rejected side, and
                       of feedback, for those of a record that is not wanted
        labelled only: 00000007.labels.npy: int16, number of a token's label, or IGNORE_INDEX
    ShardWriter.close        -> the sidecars, then the tar under its final name:
        NAME.idx.npy           int64 [members, columns]: places and CRC32s of each member's arrays
        NAME.lengths.npy       uint32 [documents, 1]: tokens of each document; of pairs,
                               [documents, 2], of target and source

Any webdataset user can read the tars; ours never parses them: the table has the place of each
array's bytes. The lengths suffice to plan which documents fill which row before any tar is fetched.
The bytes of a shard are a pure function of its documents. Shards are read in reader.py.
"""

import hashlib
import tarfile
import zlib
from array import array
from pathlib import Path

import numpy as np

from pretrain.errors import DataError, DiskError
from pretrain.kinds.layouts import LAYOUTS, Layout
from pretrain.shards.index import NPY_HEADER_BYTES, ShardIndex, Sidecar
from pretrain.shards.ragged import RaggedArrays, TokenDocuments, concatenate
from pretrain.utils.io import AtomicWriter, write_file

MEMBER_TOKENS = 2**18
MAX_DOCUMENT_TOKENS = 2**30
TAR_BLOCK = tarfile.BLOCKSIZE

RAGGED = ("offset", "length", "docs_offset", "num_docs", "crc32", "docs_crc32")
"""Six columns of the table (int64) for tokens and their documents; six more for the source of
pairs, two more (offset, CRC32) for the loss mask of records, or for labels. Offsets are bytes, from
the start of the tar to an array's data past its header.
"""

LABEL_DTYPE = "<i2"
MAX_LABELS = 2**15 - 1


def _beside(layout: Layout) -> tuple[str, str]:
    """Returns the name and the dtype of the array with a value for each token; empty names: there is none."""
    if layout.loss_mask:
        return "loss", "u1"
    return ("labels", LABEL_DTYPE) if layout.has_labels else ("", "u1")


def npy_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Returns an npy 1.0 header of NPY_HEADER_BYTES, the same bytes under every numpy version."""
    descr = dtype.newbyteorder("<").str
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    room = NPY_HEADER_BYTES - 10
    magic = b"\x93NUMPY\x01\x00" + room.to_bytes(2, "little")
    return magic + text.ljust(room - 1).encode("ascii") + b"\n"


def npy_bytes(array: np.ndarray) -> bytes:
    """Returns a whole npy file."""
    return npy_header(array.dtype, array.shape) + array.tobytes()


def write_sidecar(path: Path, values: np.ndarray) -> Sidecar:
    """Writes an array [rows, columns] as DIR/SPLIT/NAME; returns its entry. Raises: DiskError."""
    content = npy_bytes(values)
    write_file(path, content)
    return Sidecar(f"{path.parent.name}/{path.name}", zlib.crc32(content), values.shape[1])


def tar_header(name: str, num_bytes: int) -> bytes:
    """Returns the 512-byte ustar header of a regular file, the same on every machine."""
    info = tarfile.TarInfo(name)
    info.size = num_bytes
    info.mtime = 0
    info.mode = 0o444
    return info.tobuf(tarfile.USTAR_FORMAT)


class ShardWriter:
    """Writes one shard; nothing appears under its name or its sidecars' before `close`.

    Memory: one member, and the length of every document. A document is never split between members.
    """

    def __init__(self, path: Path, dtype: str, member_tokens: int = MEMBER_TOKENS, kind: str = "text") -> None:
        """Starts a shard.

        Args:
            path: DIR/SPLIT/NAME.tar; its folder exists. The index has the last two parts.
            dtype: `uint16` or `uint32`.
            member_tokens: Tokens at or past which the end of a document closes a member.
            kind: `text`, `pairs`, `records`, `preferences`, `classes`, `tags`, `answers` or `choices`.

        Raises:
            DiskError: Also from every method.
        """
        assert path.suffix == ".tar" and 1 <= member_tokens <= MAX_DOCUMENT_TOKENS
        self.path = path
        self.member_tokens = member_tokens
        self.num_tokens = self.num_documents = 0
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._layout = LAYOUTS[kind]
        self._tokens = _Column(self._dtype)
        self._source = _Column(self._dtype)
        self._beside_name, beside_dtype = _beside(self._layout)
        self._beside = _Column(np.dtype(beside_dtype))
        self._rows: list[tuple[int, ...]] = []
        self._lengths = array("I")
        self._offset = 0
        self._sha256 = hashlib.sha256()
        self._tar = AtomicWriter(path)

    def add(self, documents: TokenDocuments) -> None:
        """Appends copies of documents of the shard's kind. Raises: DataError: One is too long."""
        self._check(documents)
        while documents.num_documents:
            columns = [(self._tokens, documents.tokens)]
            if documents.source is not None:
                columns.append((self._source, documents.source))
            num_fitting = min(part.count_up_to(self.member_tokens - column.size) for column, part in columns)
            self._append(documents.slice(0, num_fitting))
            if any(column.size >= self.member_tokens for column, _ in columns):
                self._flush_member()
            documents = documents.slice(num_fitting, documents.num_documents)

    def _check(self, documents: TokenDocuments) -> None:
        tokens, source, loss, labels = documents
        assert tokens.lengths.all(), "a document has at least its end-of-document token"
        too_long = np.flatnonzero(tokens.lengths > MAX_DOCUMENT_TOKENS)
        if len(too_long):
            number = self.num_documents + too_long[0]
            size = tokens.lengths[too_long[0]]
            raise DataError(
                f"document {number} has {size} tokens, more than {MAX_DOCUMENT_TOKENS}",
                where=str(self.path),
                fix="split it in the source text",
            )
        present = [part is not None for part in (source, loss, labels)]
        layout = self._layout
        expected = [layout.has_source, layout.loss_mask, layout.has_labels]
        assert present == expected, "the arrays of the kind"
        assert source is None or source.lengths.all(), "a source has at least one token"
        beside = labels if loss is None else loss
        assert beside is None or len(beside) == len(tokens.values), "a value for each token"

    def _append(self, documents: TokenDocuments) -> None:
        """Appends documents to the member."""
        tokens, source, loss, labels = documents
        self._tokens.add(tokens)
        lengths = tokens.lengths
        if source is not None:
            self._source.add(source)
            lengths = np.stack([lengths, source.lengths], axis=1)
        beside = labels if loss is None else loss
        if beside is not None:
            self._beside.add(RaggedArrays(beside, tokens.lengths))
        self._lengths.frombytes(lengths.astype(np.uint32).tobytes())
        self.num_tokens += len(tokens.values)
        self.num_documents += documents.num_documents

    def close(self) -> ShardIndex:
        """Writes the rest and the sidecars, and commits the tar; returns its entry in the index."""
        assert self.num_documents, "a shard has at least one document"
        if self._tokens.size:
            self._flush_member()
        # Two zero blocks end a tar; readers expect whole records of 20 blocks.
        end = self._offset + 2 * TAR_BLOCK
        self._write(bytes(2 * TAR_BLOCK + -end % tarfile.RECORDSIZE))
        try:
            table = write_sidecar(self.path.with_suffix(".idx.npy"), np.array(self._rows, dtype="<i8"))
            lengths = np.array(self._lengths, dtype="<u4").reshape(-1, self._layout.length_columns)
            lengths_sidecar = write_sidecar(self.path.with_suffix(".lengths.npy"), lengths)
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

    def _flush_member(self) -> None:
        key = f"{len(self._rows):08d}"
        row = self._write_ragged(f"{key}.tokens.npy", f"{key}.docs.npy", self._tokens)
        if self._layout.has_source:
            row += self._write_ragged(f"{key}.source.npy", f"{key}.source_docs.npy", self._source)
        if self._beside_name:
            row += self._write_array(f"{key}.{self._beside_name}.npy", self._beside.take()[0])
        self._rows.append(row)

    def _write_ragged(self, name: str, docs_name: str, column: "_Column") -> tuple[int, ...]:
        """Writes the documents of a column and their starts; returns their columns of the table."""
        values, starts = column.take()
        offset, crc32 = self._write_array(name, values)
        docs_offset, docs_crc32 = self._write_array(docs_name, starts)
        return offset, len(values), docs_offset, len(starts), crc32, docs_crc32

    def _write_array(self, name: str, array: np.ndarray) -> tuple[int, int]:
        """Writes one tar entry; returns the offset of its data and their CRC32."""
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
        self._dtype = dtype
        self.size = 0
        self._parts: list[RaggedArrays] = []

    def add(self, arrays: RaggedArrays) -> None:
        """Appends copies. The values must fit the dtype."""
        values = arrays.values
        if values.dtype != self._dtype:
            limits = np.iinfo(self._dtype)
            fits = limits.min <= values.min() and values.max() <= limits.max
            assert fits, f"a token does not fit {self._dtype}"
        self._parts.append(RaggedArrays(values.astype(self._dtype), arrays.lengths))
        self.size += len(values)

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """Removes and returns all values, and the start of each array (uint32)."""
        values, lengths = concatenate(self._parts)
        self._parts = []
        self.size = 0
        return values, (np.cumsum(lengths) - lengths).astype("<u4")
