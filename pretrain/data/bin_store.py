"""The bins of a shard folder, made once for each shard and row length and kept beside the index.

    DIR/bins/SHA256-1024.safetensors        SHA256: the first 16 digits of the shard's; another shard, another file
    DIR/bins/SHA256-256x256.safetensors     pairs: source x target

A file that is missing or does not fit its shard is made again, from the lengths of the shard's documents: no shard is
read or fetched for it. Any number of processes may do this at once: they make the same bytes, each begins somewhere
else, and takes what the others have made by then. So the ranks of a node share the work, and none waits for another.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from pretrain.data.bins import Bins, pack_documents, pack_pairs, separate_documents, separate_pairs
from pretrain.errors import DiskError
from pretrain.shards.index import ShardIndex
from pretrain.shards.shard_set import MAX_OPEN_SHARDS, ShardSet
from pretrain.utils.io import make_dir, write_file

BINS_DIR = "bins"
FETCHED_AT_ONCE = 16
"""Shards whose lengths are fetched at a time."""

_FIELDS = ("starts", "document", "offset", "length")

_log = logging.getLogger(__name__)


class BinStore:
    """The bins of a split, by shard.

    Args:
        shards: The split.
        capacity: Tokens of a row, T.
        source_capacity: Pairs: tokens of a source row, S. None: not pairs.
        apart: Each document has a bin of its own; such bins are made when they are needed, and not kept on disk.
    """

    def __init__(
        self, shards: ShardSet, capacity: int, source_capacity: int | None = None, *, apart: bool = False
    ) -> None:
        self._shards, self._capacity, self._source_capacity, self._apart = shards, capacity, source_capacity, apart
        self.load: Callable[[int], Bins] = lru_cache(MAX_OPEN_SHARDS)(self._load)
        """Returns the bins of a shard. Raises: DataError: The lengths of its documents are damaged."""
        self._can_write = True

    def survey(self) -> tuple[np.ndarray, int, int]:
        """Makes the bins that are not there yet.

        Returns:
            How many each shard has, int64 [shards]; how many documents are in them; and how many of these are cut.

        Raises:
            DataError: The lengths of a shard's documents are missing or damaged.
        """
        order = np.random.default_rng().permutation(len(self._shards))  # not seeded: another one in each process
        with ThreadPoolExecutor(FETCHED_AT_ONCE if self._shards.store.fetches else 1) as pool:
            found = list(pool.map(self._count, order.tolist()))
        counts, documents, cut = np.array(found, dtype=np.int64)[np.argsort(order)].T
        return counts, int(documents.sum()), int(cut.sum())

    def _count(self, number: int) -> tuple[int, int, int]:
        bins = self.load(number)
        # A document that is cut has one second piece, which begins where its first row ended.
        return len(bins), int((bins.offset == 0).sum()), int((bins.offset == self._capacity).sum())

    def _load(self, number: int) -> Bins:
        shard = self._shards.split.shards[number]
        path = self._path(shard)
        bins = None if self._apart else _read(path, shard, pairs=self._source_capacity is not None)
        if bins is None:
            bins = self._pack(number)
            self._write(path, bins)
        return bins

    def _path(self, shard: ShardIndex) -> Path:
        size = f"{self._capacity}" if self._source_capacity is None else f"{self._source_capacity}x{self._capacity}"
        return self._shards.folder / BINS_DIR / f"{shard.sha256[:16]}-{size}.safetensors"

    def _pack(self, number: int) -> Bins:
        lengths = self._shards.lengths(number, "tokens")
        if self._source_capacity is None:
            return (separate_documents if self._apart else pack_documents)(lengths, self._capacity)
        sources = self._shards.lengths(number, "source")
        pack = separate_pairs if self._apart else pack_pairs
        return pack(sources, lengths, self._source_capacity, self._capacity)

    def _write(self, path: Path, bins: Bins) -> None:
        if self._apart or not self._can_write:
            return
        try:
            make_dir(path.parent)
            write_file(path, safetensors.numpy.save({name: getattr(bins, name) for name in _FIELDS}))
        except DiskError as error:
            self._can_write = False
            _log.warning("bins are made anew at each start: %s", error)


def _read(path: Path, shard: ShardIndex, *, pairs: bool) -> Bins | None:
    """Returns the bins in a file, or None where it is not there, cannot be read or does not fit its shard."""
    try:
        arrays = safetensors.numpy.load(path.read_bytes())
        bins = Bins(*(arrays[name] for name in _FIELDS))
    except (OSError, SafetensorError, KeyError):
        return None
    pieces = {len(bins.document), len(bins.offset), len(bins.length), int(bins.starts[-1])}
    fits = len(pieces) == 1 and (not len(bins.document) or int(bins.document.max()) < shard.num_documents)
    num_tokens = int(bins.length.sum())
    return bins if fits and (num_tokens == shard.num_tokens or (pairs and num_tokens < shard.num_tokens)) else None
