"""Shards of images: plain webdataset tars, by `webdataset.TarWriter`, with our table beside them.

    NAME.tar            00000000.cls, 00000000.jpg, 00000001.cls, ...: number of a label, image file;
                        of captioned images .txt, the caption, in place of .cls
    NAME.idx.npy        int64 [images, 4]: offset, bytes, CRC32 of an image, number of its label or 0
    NAME.lengths.npy    uint32 [images, 3]: 1 (an image counts as a token), width, height in pixels
    NAME.captions.npy   of captioned images, uint32 [1, N + 1 + tokens]: bounds of captions, tokens

The bytes of a shard are a pure function of its images. Shards are read in reader.py (`image`), and
by any user of webdataset.
"""

import hashlib
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretrain.errors import DiskError
from pretrain.shards.index import ShardIndex
from pretrain.shards.writer import TAR_BLOCK, write_sidecar
from pretrain.utils.io import AtomicWriter


class EncodedImage(NamedTuple):
    """An image as stored: file, suffix without a dot, size in pixels, its label or caption."""

    content: bytes
    suffix: str
    width: int
    height: int
    label: int | str


class _HashedFile:
    """The file of a tar, as `tarfile` writes it, with its size and SHA-256."""

    def __init__(self, path: Path) -> None:
        self.file = AtomicWriter(path)
        self.sha256 = hashlib.sha256()
        self.num_bytes = 0
        self._is_discarded = False

    def write(self, piece: bytes) -> None:
        """Appends a piece; after `discard` does nothing."""
        if self._is_discarded:
            return
        self.file.write(piece)
        self.sha256.update(piece)
        self.num_bytes += len(piece)

    def discard(self) -> None:
        """Gives the file up."""
        self._is_discarded = True
        self.file.discard()


class ImageShardWriter:
    """Writes one shard; nothing appears under its name or its sidecars' before `close`.

    Raises: DiskError, from every method.
    """

    def __init__(self, path: Path) -> None:
        """Starts a shard, DIR/SPLIT/NAME.tar, whose folder exists."""
        # webdataset takes a tenth of a second to import, and readers of shards do without.
        from webdataset import TarWriter

        self.path = path
        self._out = _HashedFile(path)
        self._tar = TarWriter(self._out, user="", group="", mtime=0)
        self._table: list[tuple[int, int, int, int]] = []
        self._sizes: list[tuple[int, int, int]] = []

    @property
    def num_bytes(self) -> int:
        """Size of the tar so far."""
        return int(self._tar.tarstream.offset)

    def add(self, image: EncodedImage) -> None:
        """Appends an image, and its label or caption."""
        key = f"{len(self._table):08d}"
        label = str(image.label).encode()
        kind = "txt" if isinstance(image.label, str) else "cls"
        self._tar.write({"__key__": key, kind: label, image.suffix: image.content})
        # TarWriter sorts the members of a sample by name; each has a header of one block.
        later = _blocks(label) if image.suffix < kind else 0
        offset = self.num_bytes - later - _blocks(image.content) + TAR_BLOCK
        number = image.label if isinstance(image.label, int) else 0
        self._table.append((offset, len(image.content), zlib.crc32(image.content), number))
        self._sizes.append((1, image.width, image.height))

    def close(self) -> ShardIndex:
        """Writes the sidecars, and commits the tar; returns its entry in the index."""
        assert self._table, "a shard has at least one image"
        self._tar.close()
        try:
            table = write_sidecar(self.path.with_suffix(".idx.npy"), np.array(self._table, dtype="<i8"))
            sizes = write_sidecar(self.path.with_suffix(".lengths.npy"), np.array(self._sizes, dtype="<u4"))
        except DiskError:
            self.discard()
            raise
        self._out.file.commit()
        return ShardIndex(
            name=f"{self.path.parent.name}/{self.path.name}",
            num_bytes=self._out.num_bytes,
            sha256=self._out.sha256.hexdigest(),
            num_tokens=len(self._table),
            num_documents=len(self._table),
            num_members=len(self._table),
            table=table,
            lengths=sizes,
        )

    def discard(self) -> None:
        """Gives the shard up and removes what was written."""
        self._out.discard()
        # An open tar would write its end when it is collected; now it goes nowhere.
        self._tar.close()


def _blocks(content: bytes) -> int:
    """Returns the bytes that a member takes in a tar: header, content, padding."""
    return TAR_BLOCK + len(content) + -len(content) % TAR_BLOCK
