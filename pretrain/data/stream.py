"""Rows of tokens by number, from one split or from all sources of a run, found by arithmetic.

    position  --SampleOrder-->  sample j  -->  tokens [j*T, j*T + T] of X
    x in X    -->  epoch x div N, offset x mod N  --bisect-->  shard  --bisect-->  member
    window w  -->  tokens [w*T, w*T + T] of the shards in their fixed order            (validation)

`TokenStream` cuts text, `BinStream` (bin_stream.py) packs documents, `ImageStream`
(image_stream.py) decodes images; `SourceStreams` reads a run's source, or its mixture. There is no
state but caches: any row can be read at any time, from any thread, at the same cost. Deliberately
not here: batches, ranks and threads (loader.py).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.config.data import DataConfig
from pretrain.config.lengths import RowLengths
from pretrain.data.bin_stream import EPOCHS_KEPT, BinStream
from pretrain.data.damage import DamagePolicy
from pretrain.data.image_stream import ImageStream
from pretrain.data.lookahead import Layout, Lookahead, layout_of
from pretrain.data.mixture import FiniteMixture, MixtureOrder, MixtureStream, end_sources
from pretrain.data.order import SampleOrder, shard_order
from pretrain.errors import ConfigError, DataError
from pretrain.rows import TokenRows
from pretrain.shards.dataset import Dataset
from pretrain.shards.index import DataIndex
from pretrain.shards.reader import MAX_OPEN_SHARDS, ShardReader, ShardSet
from pretrain.shards.remote_store import open_store
from pretrain.shards.store import ShardStore


class TokenStream:
    """The samples of one split: in training order by position, or in the fixed order of windows.

    `seed`, `lanes` and `block_samples` fix the training order (`order.py`). At most
    `max_open_shards` files stay mapped, each with a file descriptor. Rows that cannot be read are
    errors without a `damage` policy. `places` asks for those of tokens, in training order.

    Raises: DataError: There is no such split, or it is empty.
    """

    def __init__(
        self,
        folder: Path | ShardStore,
        index: DataIndex,
        split: str,
        *,
        seq_len: int,
        seed: int = 0,
        lanes: int = 1,
        block_samples: int = 1,
        max_open_shards: int = MAX_OPEN_SHARDS,
        damage: DamagePolicy | None = None,
        places: bool = False,
    ) -> None:
        shards = ShardSet(folder, index, split, max_open_shards)
        self.split = shards.split
        self.index = index
        self.seq_len = seq_len
        num_tokens = self.split.num_tokens
        self.order = SampleOrder(num_tokens, seq_len, seed=seed, lanes=lanes, block_samples=block_samples)
        self._shards = shards
        self._damage = damage or DamagePolicy()
        self._reader = self._damage.reader(shards)
        self._lookahead = None
        if shards.store.fetches:
            self._lookahead = Lookahead(shards.store, shards.split, split)
        self._sizes = np.array([shard.num_tokens for shard in self.split.shards], dtype=np.int64)
        self._epoch_layout = lru_cache(EPOCHS_KEPT)(self._build_epoch_layout)
        self._fixed_layout = layout_of(self._sizes, np.arange(len(self._sizes)))
        self._firsts = self._fixed_layout[1] if places else None

    def read(self, positions: range) -> TokenRows:
        """Reads the samples at some positions. Raises: DataError, naming shard and member."""
        if self._lookahead is not None and positions:
            self._lookahead.follow(self.order, self._epoch_layout, positions.start)
        samples = self.order.samples(positions)
        copier = _RowCopier(self.seq_len + 1, self.index.dtype, self.index.eos_id, self._firsts)
        for sample in samples.tolist():
            try:
                self._copy_sample(copier, sample * self.seq_len)
            except DataError as error:
                self._damage.skip(error, self._shards, sample)
                copier.clear_row()
        return copier.finish(samples, None)

    def num_windows(self, max_tokens: int | None = None) -> int:
        """Returns the windows in which all of the first `max_tokens`, but one, are targets."""
        num_tokens = min(self.split.num_tokens, max_tokens or self.split.num_tokens)
        return -(-(num_tokens - 1) // self.seq_len)

    def read_windows(self, windows: range, max_tokens: int | None = None) -> TokenRows:
        """Reads windows of the fixed order; rows past the end are padding. Raises: DataError."""
        num_tokens = min(self.split.num_tokens, max_tokens or self.split.num_tokens)
        if self._lookahead is not None and windows:
            first, end = windows.start * self.seq_len, windows.stop * self.seq_len + 1
            self._lookahead.follow_fixed(self._fixed_layout, first, end, num_tokens)
        copier = _RowCopier(self.seq_len + 1, self.index.dtype, self.index.eos_id)
        starts = np.array(windows, dtype=np.int64) * self.seq_len
        sizes = np.clip(num_tokens - starts, 0, self.seq_len + 1)
        for window, start, size in zip(windows, starts.tolist(), sizes.tolist(), strict=True):
            try:
                copier.copy(self._reader, self._fixed_layout, start, size)
            except DataError as error:
                self._damage.skip(error, self._shards, window)
                copier.clear_row()
            else:
                copier.pad(self.seq_len + 1 - size)
        return copier.finish(np.array(windows, dtype=np.int64), sizes)

    def _copy_sample(self, copier: "_RowCopier", start: int) -> None:
        """Copies the T + 1 tokens of X from `start`, through as many epochs as they reach into."""
        wanted = self.seq_len + 1
        num_tokens = self.split.num_tokens
        epoch, offset = divmod(start, num_tokens)
        while offset + wanted > num_tokens:
            copier.copy(self._reader, self._epoch_layout(epoch), offset, num_tokens - offset)
            wanted -= num_tokens - offset
            epoch += 1
            offset = 0
        copier.copy(self._reader, self._epoch_layout(epoch), offset, wanted)

    def _build_epoch_layout(self, epoch: int) -> Layout:
        return layout_of(self._sizes, shard_order(len(self._sizes), self.order.seed, epoch))


SplitStream = TokenStream | BinStream | ImageStream
"""The samples of one split."""


class _RowCopier:
    """Pieces of rows, as views of shards, with the starts of their documents; copied at once."""

    def __init__(self, width: int, dtype: str, fill: int, firsts: list[int] | None = None) -> None:
        self._firsts = firsts  # place of each shard's first token; None: places are not asked for
        self._places: list[np.ndarray] = []
        self._width = width
        self._dtype = dtype
        self._fill = fill
        self._at = 0
        self._pieces: list[np.ndarray] = []
        self._cleared: list[int] = []
        self._starts: list[np.ndarray] = []
        self._shifts: list[int] = []

    def copy(self, open_shard: Callable[[int], ShardReader], layout: Layout, offset: int, wanted: int) -> None:
        """Appends `wanted` tokens from `offset` of a layout, through members and shards."""
        # Called for each row: steps in Python cost the time, so there is no further call.
        shards, shard_starts = layout
        while wanted:
            slot = bisect_right(shard_starts, offset) - 1
            reader = open_shard(shards[slot])
            member_starts = reader.member_starts
            within = offset - shard_starts[slot]
            member = bisect_right(member_starts, within) - 1
            tokens, docs = reader.member(member)
            within -= member_starts[member]
            piece = tokens[within : within + wanted]
            size = len(piece)
            if self._firsts is not None:
                place = self._firsts[shards[slot]] + member_starts[member] + within
                self._places.append(np.arange(place, place + size))
            places = docs.data
            low = bisect_left(places, within)
            high = bisect_left(places, within + size, low)
            if low < high:
                self._starts.append(docs[low:high])
                self._shifts.append(self._at - within)
            self._pieces.append(piece)
            self._at += size
            offset += size
            wanted -= size

    def pad(self, missing: int) -> None:
        if missing:
            self._pieces.append(np.full(missing, self._fill, dtype=self._dtype))
            if self._firsts is not None:
                self._places.append(np.full(missing, -1))
            self._at += missing

    def clear_row(self) -> None:
        row, done = divmod(self._at, self._width)
        self._at -= done
        while done:
            done -= len(self._pieces.pop())
            if self._firsts is not None:
                self._places.pop()
        while self._starts and int(self._starts[-1][0]) + self._shifts[-1] >= self._at:
            self._starts.pop()
            self._shifts.pop()
        self._cleared.append(row)
        self.pad(self._width)

    def finish(self, sample_ids: np.ndarray, num_tokens: np.ndarray | None) -> TokenRows:
        """Returns the rows; `num_tokens` are the real ones before clearing. None: all."""
        if self._cleared:
            num_tokens = np.full(self._at // self._width, self._width) if num_tokens is None else num_tokens
            num_tokens[self._cleared] = 0
        tokens = np.concatenate(self._pieces) if self._pieces else np.empty(0, self._dtype)
        starts = np.empty(0, np.int64)
        if self._starts:
            shifts = np.repeat(self._shifts, [len(part) for part in self._starts])
            starts = np.add(np.concatenate(self._starts), shifts, dtype=np.int64)
        places = None
        if self._firsts is not None:
            places = np.concatenate([np.empty(0, np.int64), *self._places]).reshape(-1, self._width)
        return TokenRows(tokens.reshape(-1, self._width), sample_ids, starts, num_tokens, places_BT=places)


class SourceStreams:
    """The training samples of a run, from all sources; a position counts samples of all of them.

    Raises:
        ConfigError: Weights that repeat too late, or a packing that the kind of data does not have.
        DataError: A source has no training tokens, or is damaged.
    """

    def __init__(
        self,
        dataset: Dataset,
        stores: Sequence[ShardStore],
        data: DataConfig,
        lengths: RowLengths,
        batch_rows: int,
        seed: int,
        *,
        places: bool = False,
    ) -> None:
        self._dataset = dataset
        self._row_len = lengths.row
        self.damage = DamagePolicy(data.on_error, data.max_skipped_rows)
        order: dict[str, Any] = {"seed": seed, "lanes": data.lanes, "block_samples": data.block_samples}
        order |= {"places": True} if places else {}
        self._streams = [
            _open_split("train", source.index, store, data, lengths, batch_rows, self.damage, order)
            for source, store in zip(dataset.sources, stores, strict=True)
        ]
        self._mixture: MixtureStream | None = None
        self._ending = FiniteMixture([(0, [1.0])], {}, None)
        if data.mixture:
            supplies = {
                number: int(self._samples_per_epoch(stream))
                for number, (source, stream) in enumerate(zip(dataset.sources, self._streams, strict=True))
                if not source.repeats
            }
            self._ending = end_sources(_segments(data, lengths.row), supplies)
            if self._ending.end == 0:
                self.check_supply(1)
            self._mixture = MixtureStream(self._streams, MixtureOrder(self._ending.segments))

    def read(self, positions: range) -> TokenRows:
        """Reads the samples at some positions. Raises: DataError: A shard is missing or damaged."""
        return self._streams[0].read(positions) if self._mixture is None else self._mixture.read(positions)

    def epochs(self, position: int) -> dict[str, float]:
        """Returns the epochs of each source before a position."""
        counts = [position] if self._mixture is None else self._mixture.order.counts(position).tolist()
        return {
            source.name: count / self._samples_per_epoch(stream)
            for source, stream, count in zip(self._dataset.sources, self._streams, counts, strict=True)
        }

    def too_long(self) -> list[str]:
        """Returns a message for each source with documents that do not fit a row."""
        notes = []
        for source, stream in zip(self._dataset.sources, self._streams, strict=True):
            treatment = source.index.layout.too_long
            if isinstance(stream, BinStream) and treatment and stream.num_too_long:
                num_documents = source.index.splits["train"].num_documents
                note = f"{stream.num_too_long:,} of {num_documents:,} {treatment}"
                notes.append(f"{source.name}: {note}; raise it, or drop them by filter.max_chars of prepare")
        return notes

    def ends(self, num_samples: int) -> dict[str, int]:
        """Returns the end position of each source that ends within `num_samples` of the run."""
        ends = sorted(self._ending.ends.items(), key=lambda item: item[1])
        return {self._dataset.sources[number].name: end for number, end in ends if end < num_samples}

    def check_supply(self, num_samples: int) -> None:
        """Checks that sources suffice for a run of `num_samples`. Raises: ConfigError."""
        end = self._ending.end
        if end is not None and num_samples > end:
            raise ConfigError(
                f"data.mixture: no source is left after {end} of the run's {num_samples} samples "
                f"({end * self._row_len} tokens): {', '.join(self.ends(num_samples))} do not repeat",
                fix="lower train.steps, or set the repeat of a source to true",
            )

    @staticmethod
    def _samples_per_epoch(stream: SplitStream) -> float:
        return stream.order.num_tokens / stream.order.seq_len


def open_stores(data: DataConfig, stop: Callable[[], bool]) -> list[ShardStore]:
    """Opens the shard store of each source, addresses through the cache. Raises: as `open_store`."""
    cache_dir = Path(data.cache_dir).expanduser()
    cache_bytes = int(data.cache_gib * 2**30)
    return [open_store(path, cache_dir, cache_bytes, stop=stop) for path in data.paths]


def check_packing(index: DataIndex, data: DataConfig) -> None:
    """Checks the packing of a kind of data. Raises: ConfigError."""
    if data.packing == "concat" != index.layout.packing:
        raise ConfigError(
            f"data.packing=concat cuts documents, which {index.kind} must not be", fix="use data.packing=bins"
        )


def open_windows(
    index: DataIndex,
    store: ShardStore,
    data: DataConfig,
    lengths: RowLengths,
    batch_rows: int,
    damage: DamagePolicy | None = None,
    split: str = "validation",
) -> SplitStream:
    """Opens a split of a source, by default validation, which is read in a fixed order."""
    return _open_split(split, index, store, data, lengths, batch_rows, damage, {})


def _open_split(
    split: str,
    index: DataIndex,
    store: ShardStore,
    data: DataConfig,
    lengths: RowLengths,
    batch_rows: int,
    damage: DamagePolicy | None,
    order: dict[str, Any],
) -> SplitStream:
    if index.has_images:
        assert lengths.image is not None, "objectives of images are of models of images"
        return ImageStream(
            store, index, split, image=lengths.image, seq_len=lengths.row, config=data.images, damage=damage, **order
        )
    if split == "train":
        check_packing(index, data)
    # Validation cuts texts under any packing: it measures each token once.
    if index.layout.running_text and (split == "validation" or data.packing == "concat"):
        return TokenStream(store, index, split, seq_len=lengths.row, damage=damage, **order)
    return BinStream(
        ShardSet(store, index, split),
        seq_len=lengths.row,
        source_len=lengths.source if index.layout.has_source else None,
        bucket_rows=batch_rows if data.packing == "padded" else None,
        damage=damage,
        **order,
    )


def _segments(data: DataConfig, seq_len: int) -> list[tuple[int, list[float]]]:
    segments = [(0, [source.weight for source in data.mixture])]
    for milestone in data.curriculum:
        weights = [milestone.weights.get(source.name, 0.0) for source in data.mixture]
        segments.append((-(-milestone.tokens // seq_len), weights))
    return segments
