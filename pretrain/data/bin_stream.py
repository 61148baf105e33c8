"""Rows of whole documents: samples are bins in the order of `SampleOrder`, or documents by length.

    position  --SampleOrder over bins-->  sample j  -->  epoch, place in it  -->  shard, bin
    bin       -->  its pieces, copied side by side; the rest of the row is a document of padding

Padding is the end-of-document token, in a document of its own, which no other token sees and which
has no loss. Rows that are padded and not packed are regrouped, with similar lengths in one batch:

    groups       of GROUP_BATCHES global batches: the samples at [g W, (g + 1) W) of the order
                 below, W = batches x rows
    in a group   sorted by length, cut into batches, the batches permuted by (seed, g)

A group keeps its samples, so every sample still comes exactly once an epoch, and any position is
found by one group. The rows of a global batch are part of the order; world size and micro-batch are
not. Not here: the documents of a bin (`bins.py`).
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np

from pretrain.data.bins import BinStore
from pretrain.data.damage import DamagePolicy
from pretrain.data.lookahead import Layout, Lookahead, layout_of
from pretrain.data.order import SampleOrder, random_bits, rank_bits, shard_order
from pretrain.errors import DataError
from pretrain.kinds.layouts.choices import CHOICE_BEGINS
from pretrain.rows import IGNORE_INDEX, TokenRows
from pretrain.shards.index import REJECTED
from pretrain.shards.reader import ShardReader, ShardSet

GROUP_BATCHES = 64
GROUPS_KEPT = 2
EPOCHS_KEPT = 4


class BucketOrder:
    """Regroups a sample order by the lengths of samples, for global batches of `batch_rows`."""

    def __init__(
        self, order: SampleOrder, lengths_of: Callable[[np.ndarray], np.ndarray], *, batch_rows: int, seed: int
    ) -> None:
        self._order = order
        self._lengths_of = lengths_of
        self._rows = batch_rows
        self._seed = seed
        self._size = GROUP_BATCHES * batch_rows
        self._group = lru_cache(GROUPS_KEPT)(self._build_group)

    def samples(self, positions: range) -> np.ndarray:
        """Returns the samples at ascending positions, one apart, int64."""
        parts = [np.empty(0, np.int64)]
        at = positions.start
        while at < positions.stop:
            number, offset = divmod(at, self._size)
            part = self._group(number)[offset : offset + positions.stop - at]
            parts.append(part)
            at += len(part)
        return np.concatenate(parts)

    def _build_group(self, number: int) -> np.ndarray:
        samples = self._order.samples(range(number * self._size, (number + 1) * self._size))
        by_length = samples[np.argsort(self._lengths_of(samples), kind="stable")]
        batches = rank_bits(random_bits("buckets", (self._seed, number), GROUP_BATCHES))
        return by_length.reshape(GROUP_BATCHES, self._rows)[batches].reshape(-1)


class BinStream:
    """The samples of one split, packed: texts, labelled or not, records, preferences, answers, pairs.

    Rows have `seq_len` tokens, T; those of the sources of pairs `source_len`, S. With
    `bucket_rows`, the rows of a global batch, rows are padded documents of similar length. `seed`,
    `lanes` and `block_samples` fix the order (`order.py`). Rows that cannot be read are errors
    without a `damage` policy. `places` asks for those of tokens.

    Raises:
        DataError: No document fits a row; or the lengths of documents are damaged.
    """

    def __init__(
        self,
        shards: ShardSet,
        *,
        seq_len: int,
        source_len: int | None = None,
        seed: int = 0,
        lanes: int = 1,
        block_samples: int = 1,
        bucket_rows: int | None = None,
        damage: DamagePolicy | None = None,
        places: bool = False,
    ) -> None:
        self._damage = damage or DamagePolicy()
        sizes = np.array([shard.num_tokens for shard in shards.split.shards], dtype=np.int64)
        self._firsts = layout_of(sizes, np.arange(len(sizes)))[1] if places else None
        self._reader = self._damage.reader(shards)
        self.shards = shards
        self.seq_len = seq_len
        self.source_len = source_len
        self._store = BinStore(shards, seq_len, source_len, apart=bucket_rows is not None)
        self._counts, num_documents, num_cut = self._store.survey()
        # Documents longer than a row: cut; pairs, and documents that are `whole`: in no bin.
        is_cut = source_len is None and not shards.index.layout.whole
        self.num_too_long = num_cut if is_cut else shards.split.num_documents - num_documents
        if not self._counts.sum():
            raise DataError("no document fits a row", where=str(shards.folder), fix="raise batch.seq_len")
        self.order = SampleOrder(int(self._counts.sum()), 1, seed=seed, lanes=lanes, block_samples=block_samples)
        self._layout = lru_cache(EPOCHS_KEPT)(self._build_layout)
        self._lookahead = None
        if shards.store.fetches:
            self._lookahead = Lookahead(shards.store, shards.split, shards.name)
        self._picks: SampleOrder | BucketOrder = self.order
        if bucket_rows is not None:
            self._picks = BucketOrder(self.order, self._lengths_of, batch_rows=bucket_rows, seed=seed)

    def read(self, positions: range) -> TokenRows:
        """Reads the samples at some positions. Raises: DataError, naming shard and member."""
        if self._lookahead is not None and positions:
            self._lookahead.follow(self.order, self._layout, positions.start, overlap=0)
        samples = self._picks.samples(positions)
        return self._read_rows([self._locate(sample) for sample in samples.tolist()], samples)

    def num_windows(self, max_tokens: int | None = None) -> int:
        """Returns how many rows cover the split, or its first `max_tokens` tokens."""
        num_bins = self.order.num_tokens
        return num_bins if max_tokens is None else min(num_bins, -(-max_tokens // self.seq_len))

    def read_windows(self, windows: range, max_tokens: int | None = None) -> TokenRows:
        """Reads rows in a fixed order; those past `num_windows` are padding. Raises: DataError."""
        count = self.num_windows(max_tokens)
        places = [self._locate(window) if window < count else None for window in windows]
        return self._read_rows(places, np.array(windows, dtype=np.int64))

    def _locate(self, sample: int) -> tuple[int, int]:
        epoch, place = divmod(sample, self.order.num_tokens)
        shards, starts = self._layout(epoch)
        slot = bisect_right(starts, place) - 1
        return shards[slot], place - starts[slot]

    def _lengths_of(self, samples: np.ndarray) -> np.ndarray:
        lengths = np.empty(len(samples), dtype=np.int64)
        for row, sample in enumerate(samples.tolist()):
            shard, number = self._locate(sample)
            bins = self._store.load(shard)
            lengths[row] = bins.length[number]
            if self.source_len is not None:
                lengths[row] += self.shards.lengths(shard, "source")[bins.document[number]]
        return lengths

    def _read_rows(self, places: list[tuple[int, int] | None], samples: np.ndarray) -> TokenRows:
        writers = [_RowWriter(len(places), self.seq_len, self.shards, self._reader, "tokens", self._firsts)]
        if self.source_len is not None:
            writers.append(_RowWriter(len(places), self.source_len, self.shards, self._reader, "source"))
        for row, place in enumerate(places):
            if place is None:
                continue
            shard, number = place
            bins = self._store.load(shard)
            pieces = slice(int(bins.starts[number]), int(bins.starts[number + 1]))
            documents = bins.document[pieces].tolist()
            try:
                for document, offset in zip(documents, bins.offset[pieces].tolist(), strict=True):
                    for writer in writers:
                        writer.copy(row, shard, document, offset)
            except DataError as error:
                self._damage.skip(error, self.shards, int(samples[row]))
                for writer in writers:  # a pair without its other side has no loss
                    writer.clear(row)
        rows, *sources = (writer.finish(samples) for writer in writers)
        return replace(rows, source=sources[0]) if sources else rows

    def _build_layout(self, epoch: int) -> Layout:
        return layout_of(self._counts, shard_order(len(self.shards), self.order.seed, epoch))


class _RowWriter:
    """Rows of one side, filled document by document."""

    def __init__(
        self,
        num_rows: int,
        length: int,
        shards: ShardSet,
        reader: Callable[[int], ShardReader],
        side: str,
        firsts: list[int] | None = None,
    ) -> None:
        self._shards = shards
        self._reader = reader
        self._side = side
        self._length = length
        shape = (num_rows, length + 1)
        self._tokens = np.full(shape, shards.index.eos_id, dtype=shards.index.dtype)
        layout = shards.index.layout
        self._loss_mask = np.zeros(shape, dtype=bool) if layout.loss_mask else None
        self._has_sides = layout.two_sides
        self._is_judged = layout.judged
        self._has_choices = layout.many_choices
        has_labels = layout.has_labels or layout.judged
        self._labels = np.full(shape, IGNORE_INDEX, dtype=np.int16) if has_labels else None
        self._firsts = firsts
        self._places = None if firsts is None else np.full(shape, -1, dtype=np.int64)
        self._filled = np.zeros(num_rows, dtype=np.int64)
        self._starts: list[int] = []

    def copy(self, row: int, shard: int, document: int, offset: int) -> None:
        """Appends what fits of a document from `offset`, and the target of a full row's last token."""
        reader = self._reader(shard)
        member, first, length = reader.locate(document, self._side)
        first += offset
        at = int(self._filled[row])
        size = min(length - offset, self._length + 1 - at)
        values, _ = reader.source(member) if self._side == "source" else reader.member(member)
        self._tokens[row, at : at + size] = values[first : first + size]
        if self._places is not None and self._firsts is not None:
            place = self._firsts[shard] + reader.member_starts[member] + first
            self._places[row, at : at + size] = np.arange(place, place + size)
        if self._loss_mask is not None:
            mask = reader.loss(member)[first : first + size]
            self._loss_mask[row, at : at + size] = mask & 1
            if self._has_sides:  # the rejected side is a document of its own
                second = at + int(np.argmax(mask >= REJECTED))
                self._starts.append(row * self._tokens.shape[1] + second)
        if self._labels is not None and self._is_judged:
            self._labels[row, at : at + size] = reader.loss(member)[first : first + size] < REJECTED
        elif self._labels is not None:
            marks = reader.labels(member)[first : first + size]
            self._labels[row, at : at + size] = marks
            if self._has_choices:  # each is a document of its own
                (starts,) = np.nonzero((marks[1:] > 0) & (marks[1:] & CHOICE_BEGINS))
                self._starts.extend((row * self._tokens.shape[1] + at + 1 + starts).tolist())
        self._starts.append(row * self._tokens.shape[1] + at)
        self._filled[row] = at + size

    def clear(self, row: int) -> None:
        width = self._tokens.shape[1]
        self._tokens[row] = self._shards.index.eos_id
        if self._places is not None:
            self._places[row] = -1
        if self._loss_mask is not None:
            self._loss_mask[row] = False
        if self._labels is not None:
            self._labels[row] = IGNORE_INDEX
        self._filled[row] = 0
        while self._starts and self._starts[-1] >= row * width:
            self._starts.pop()

    def finish(self, samples: np.ndarray) -> TokenRows:
        """Returns the rows; what is left of each is a document of its own."""
        (short,) = np.nonzero(self._filled < self._length)
        padding = short * self._tokens.shape[1] + self._filled[short]
        starts = np.sort(np.concatenate((np.array(self._starts, dtype=np.int64), padding)))
        beside = self._loss_mask, self._labels
        return TokenRows(self._tokens, samples, starts, self._filled, *beside, places_BT=self._places)
