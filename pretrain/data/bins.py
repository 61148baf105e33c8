"""Best-fit packing: whole documents into rows of T tokens, none cut that fits (Ding et al. 2024).

    lengths of a shard's documents -> pieces: a document longer than T is cut into rows of its own
                                      and a rest; one that is `whole` is left out, of one that is
                                      a `beginning` its rest
      -> longest first, each into the fullest bin that has room -> Bins, in the order of opening

A bin is a sample, of one shard. The bins are a pure function of the lengths and T. Pairs fill two
rows at once, source and target, with the same documents. The bins of a shard folder are cached for
each shard and row length:

    DIR/bins/SHA256-1024.safetensors        SHA256: the first 16 digits of the shard's hash
    DIR/bins/SHA256-256x256.safetensors     pairs: source x target

A file that is missing or does not fit its shard is made again, from the lengths of the shard's
documents: no shard is read or fetched for it. Any number of processes may do so at once: they make
the same bytes, each begins at another shard and takes the files of the others, so that the ranks of
a node share the work without waiting. Not here: tokens, and the order of bins in training.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from pretrain.errors import DiskError
from pretrain.kinds.layouts import LAYOUTS
from pretrain.shards.index import ShardIndex
from pretrain.shards.reader import MAX_OPEN_SHARDS, ShardSet
from pretrain.utils.io import make_dir, write_file

# Open bins of pairs: a pair goes to the best of these.
OPEN_PAIRS = 64

BINS_DIR = "bins"
# Shards whose lengths are fetched at a time.
FETCHED_AT_ONCE = 16

_FIELDS = ("starts", "document", "offset", "length")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bins:
    """The samples of one shard, in int64: bin b holds the pieces starts[b] to starts[b + 1].

    Each piece has the number of its document in the shard, its offset in that, and its length.
    """

    starts: np.ndarray
    document: np.ndarray
    offset: np.ndarray
    length: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1


def cut_documents(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts documents longer than `capacity`; returns document, offset and length of each piece."""
    counts = -(-lengths // capacity)
    document = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = number * capacity
    return document, offset, np.minimum(lengths[document] - offset, capacity)


def pack_documents(lengths: np.ndarray, capacity: int, *, apart: bool = False, kind: str = "text") -> Bins:
    """Packs documents of a shard into bins of `capacity` tokens: best-fit decreasing.

    Every token of every document is in exactly one bin, but for what longer ones of some kinds lose
    (`Layout.whole`, `Layout.beginning`). Costs about two microseconds a document. Lengths are int64, at least 1;
    `apart` gives each document, or piece of one, a bin of its own.
    """
    document, offset, length = cut_documents(lengths.astype(np.int64), capacity)
    layout = LAYOUTS[kind]
    if layout.whole or layout.beginning:
        is_kept = offset == 0 if layout.beginning else lengths[document] <= capacity
        document, offset, length = (values[is_kept] for values in (document, offset, length))
    placed = np.arange(len(length))
    if not apart:
        order = np.argsort(-length, kind="stable")
        placed[order] = _best_fit(length[order].tolist(), capacity)
    return _group(placed, document, offset, length)


def _best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Returns the bin of each item; items come longest first."""
    # Bins by the room that they have left. Bit r of `rooms` says that some bin has room r.
    bins_with: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    opened = 0
    placed: list[int] = []
    for length in lengths:
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            number = bins_with[room].pop()
            if not bins_with[room]:
                rooms ^= 1 << room
        else:
            room = capacity
            number = opened
            opened += 1
        placed.append(number)
        rest = room - length
        if rest:
            bins_with[rest].append(number)
            rooms |= 1 << rest
    return placed


def pack_pairs(
    source_lengths: np.ndarray, lengths: np.ndarray, source_capacity: int, capacity: int, *, apart: bool = False
) -> Bins:
    """Packs pairs into bins of `source_capacity` tokens on one side and `capacity` on the other.

    Lengths are int64, one a pair. Pairs longer than a row on either side are in no bin: the caller
    counts and reports them. `apart` gives each pair a bin of its own.
    """
    (documents,) = np.nonzero((source_lengths <= source_capacity) & (lengths <= capacity))
    sizes = np.stack((source_lengths[documents], lengths[documents]), axis=1).astype(np.int64)
    placed = np.arange(len(documents))
    if not apart:
        placed = _best_fit_pairs(sizes, np.array([source_capacity, capacity]))
    return _group(placed, documents, np.zeros_like(documents), sizes[:, 1])


def _best_fit_pairs(sizes: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Returns the bin of each pair, by sizes, int64 [pairs, 2], and the capacity of bins, [2]."""
    # First come the pairs that fill most of either side; each goes to that of `OPEN_PAIRS` open bins
    # which it leaves the least room in.
    order = np.argsort(-(sizes / capacity).max(axis=1), kind="stable")
    rooms = np.empty((0, 2), dtype=np.int64)
    numbers = np.empty(0, dtype=np.int64)
    placed = np.empty(len(sizes), dtype=np.int64)
    opened = 0
    scale = 1 / capacity
    for item in order.tolist():
        rest = rooms - sizes[item]
        (fitting,) = np.nonzero((rest >= 0).all(axis=1))
        if len(fitting):
            best = fitting[np.argmin((rest[fitting] * scale).sum(axis=1))]
            rooms[best] = rest[best]
            placed[item] = numbers[best]
            continue
        room = capacity - sizes[item]
        if len(rooms) < OPEN_PAIRS:
            rooms = np.concatenate((rooms, room[None]))
            numbers = np.append(numbers, opened)
        else:  # the one with the least room makes way
            fullest = int(np.argmin((rooms * scale).sum(axis=1)))
            rooms[fullest] = room
            numbers[fullest] = opened
        placed[item] = opened
        opened += 1
    return placed


def _group(placed: np.ndarray, document: np.ndarray, offset: np.ndarray, length: np.ndarray) -> Bins:
    order = np.argsort(placed, kind="stable")
    counts = np.bincount(placed, minlength=int(placed.max()) + 1 if len(placed) else 0)
    starts = np.concatenate(([0], np.cumsum(counts)))
    return Bins(starts, document[order], offset[order], length[order])


class BinStore:
    """The bins of a split, by shard; `source_capacity` is None where documents are no pairs.

    With `apart`, bins of one document each are made when needed, and not kept on disk.
    """

    def __init__(
        self, shards: ShardSet, capacity: int, source_capacity: int | None = None, *, apart: bool = False
    ) -> None:
        self._shards = shards
        self._capacity = capacity
        self._source_capacity = source_capacity
        self._apart = apart
        self._kind = shards.index.kind
        # Returns the bins of a shard. Raises: DataError: The lengths of its documents are damaged.
        self.load: Callable[[int], Bins] = lru_cache(MAX_OPEN_SHARDS)(self._load)
        self._can_write = True

    def survey(self) -> tuple[np.ndarray, int, int]:
        """Makes missing bins; returns the bins of each shard, int64, documents in them, and cut ones."""
        # Not seeded: another order in each process.
        order = np.random.default_rng().permutation(len(self._shards))
        with ThreadPoolExecutor(FETCHED_AT_ONCE if self._shards.store.fetches else 1) as pool:
            counted = list(pool.map(self._count, order.tolist()))
        counts, documents, cut = np.array(counted, dtype=np.int64)[np.argsort(order)].T
        return counts, int(documents.sum()), int(cut.sum())

    def _count(self, number: int) -> tuple[int, int, int]:
        bins = self.load(number)
        # A document that is cut has one second piece, which begins where its first row ended.
        num_cut = int((bins.offset == self._capacity).sum())
        if LAYOUTS[self._kind].beginning:
            num_cut = int((self._shards.lengths(number, "tokens") > self._capacity).sum())
        return len(bins), int((bins.offset == 0).sum()), num_cut

    def _load(self, number: int) -> Bins:
        if self._apart:
            return self._pack(number)
        shard = self._shards.split.shards[number]
        size = f"{self._capacity}" if self._source_capacity is None else f"{self._source_capacity}x{self._capacity}"
        path = self._shards.folder / BINS_DIR / f"{shard.sha256[:16]}-{size}.safetensors"
        layout = LAYOUTS[self._kind]
        leaves_out = self._source_capacity is not None or layout.whole or layout.beginning
        bins = _read(path, shard, leaves_out=leaves_out)
        if bins is None:
            bins = self._pack(number)
            self._write(path, bins)
        return bins

    def _pack(self, number: int) -> Bins:
        lengths = self._shards.lengths(number, "tokens")
        if self._source_capacity is None:
            return pack_documents(lengths, self._capacity, apart=self._apart, kind=self._kind)
        sources = self._shards.lengths(number, "source")
        return pack_pairs(sources, lengths, self._source_capacity, self._capacity, apart=self._apart)

    def _write(self, path: Path, bins: Bins) -> None:
        if not self._can_write:
            return
        try:
            make_dir(path.parent)
            write_file(path, safetensors.numpy.save({name: getattr(bins, name) for name in _FIELDS}))
        except DiskError as error:
            self._can_write = False
            _log.warning("bins are made anew at each start: %s", error)


def _read(path: Path, shard: ShardIndex, *, leaves_out: bool) -> Bins | None:
    """Returns the bins in a file; None where it cannot be read or does not fit its shard.

    `leaves_out`: of documents that are too long, which earlier versions cut, no second piece is there.
    """
    try:
        arrays = safetensors.numpy.load(path.read_bytes())
        bins = Bins(*(arrays[name] for name in _FIELDS))
    except (OSError, SafetensorError, KeyError):
        return None
    pieces = {len(bins.document), len(bins.offset), len(bins.length), int(bins.starts[-1])}
    num_tokens = int(bins.length.sum())
    fits = len(pieces) == 1 and int(bins.document.max(initial=-1)) < shard.num_documents
    is_complete = num_tokens == shard.num_tokens or (leaves_out and num_tokens < shard.num_tokens)
    return bins if fits and is_complete and not (leaves_out and bins.offset.any()) else None
