"""The samples of a mixture: each position of the run belongs to a source, and is some position of that source.

    positions  --MixtureOrder-->  for each source a run of its own positions  -->  its stream reads them
    rows of all sources, put back in the order of the positions; sample ids carry the source in their top bits

Sources are streams of one kind, tokenizer and row length. Holds no state. Not here: weights (mixture.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pretrain.config.data import DataConfig
from pretrain.config.lengths import RowLengths
from pretrain.data.bin_stream import BinStream
from pretrain.data.damage import DamagePolicy
from pretrain.data.mixture import FiniteMixture, MixtureOrder, end_sources
from pretrain.data.stream import TokenStream
from pretrain.errors import ConfigError
from pretrain.rows import PairRows, TokenRows
from pretrain.shards.dataset import Dataset
from pretrain.shards.index import DataIndex
from pretrain.shards.reader import ShardSet
from pretrain.shards.remote_store import open_store
from pretrain.shards.store import ShardStore

SOURCE_BITS = 12
"""Bits of a sample id with its source, below the sign: up to 4,096 sources of 2**51 samples each."""


class SampleSource(Protocol):
    """A stream that a mixture can draw from."""

    def read(self, positions: range) -> TokenRows | PairRows:
        """Reads the samples at some positions."""


class MixtureStream:
    """Draws from several streams."""

    def __init__(self, sources: Sequence[SampleSource], order: MixtureOrder) -> None:
        assert 1 <= len(sources) <= 1 << SOURCE_BITS
        self._sources, self.order = sources, order

    def read(self, positions: range) -> TokenRows | PairRows:
        """Reads the samples at some ascending positions of the run, one apart.

        Raises:
            DataError: A shard of a source is missing or damaged.
        """
        assert positions.step == 1
        sources, places = self.order.pick(positions)
        parts, order = [], []
        for source in np.unique(sources).tolist():
            (rows,) = np.nonzero(sources == source)
            # Consecutive positions of the run hold consecutive samples of each source.
            first, last = int(places[rows[0]]), int(places[rows[-1]])
            parts.append(_with_source(self._sources[source].read(range(first, last + 1)), source))
            order.append(rows)
        return merge_rows(parts, np.concatenate(order))


def source_of(sample_ids: np.ndarray) -> np.ndarray:
    """Returns the source of each sample of a mixture, int64."""
    return sample_ids >> (63 - SOURCE_BITS)


def _with_source(rows: TokenRows | PairRows, source: int) -> TokenRows | PairRows:
    if isinstance(rows, PairRows):
        return PairRows(_numbered(rows.source, source), _numbered(rows.target, source))
    return _numbered(rows, source)


def _numbered(rows: TokenRows, source: int) -> TokenRows:
    ids = rows.sample_ids + (source << (63 - SOURCE_BITS))
    return replace(rows, sample_ids=ids)


def merge_rows(parts: Sequence[TokenRows | PairRows], places: np.ndarray) -> TokenRows | PairRows:
    """Puts the rows of all parts, one after another, at `places`, int64 [rows of all parts]."""
    pairs = [part for part in parts if isinstance(part, PairRows)]
    if pairs:
        assert len(pairs) == len(parts), "sources of one mixture are of one kind"
        source = _merge_side([part.source for part in pairs], places)
        return PairRows(source, _merge_side([part.target for part in pairs], places))
    return _merge_side([part for part in parts if isinstance(part, TokenRows)], places)


def _merge_side(parts: list[TokenRows], places: np.ndarray) -> TokenRows:
    tokens = np.concatenate([part.tokens for part in parts])
    width = tokens.shape[1]
    first_rows = np.cumsum([0, *(len(part.tokens) for part in parts[:-1])])
    starts = np.concatenate([part.starts + first * width for part, first in zip(parts, first_rows, strict=True)])
    row, column = np.divmod(starts, width)
    back = np.argsort(places)

    def gather(arrays: list[np.ndarray | None]) -> np.ndarray | None:
        found = [array for array in arrays if array is not None]
        assert len(found) in (0, len(arrays)), "sources of one mixture are packed alike"
        return np.concatenate(found)[back] if found else None

    num_tokens = [part.num_tokens for part in parts]
    if any(numbers is not None for numbers in num_tokens):
        # Only a part with skipped rows has counts; a complete one has full rows.
        whole = [np.full(len(part.tokens), width) for part in parts]
        num_tokens = [every if numbers is None else numbers for numbers, every in zip(num_tokens, whole, strict=True)]
    return TokenRows(
        tokens=tokens[back],
        starts=np.sort(places[row] * width + column),
        num_tokens=gather(num_tokens),
        sample_ids=np.concatenate([part.sample_ids for part in parts])[back],
        loss_mask=gather([part.loss_mask for part in parts]),
        labels=gather([part.labels for part in parts]),
    )


TOO_LONG = {
    "pairs": "pairs are longer than batch.source_len or batch.seq_len, and left out",
    "records": "records are longer than batch.seq_len, and cut: the rest is trained on without its prompt",
    "classes": "texts are longer than batch.seq_len, and cut: only their beginning is trained on",
    "tags": "texts are longer than batch.seq_len, and cut",
}

"""Treatment of documents that are longer than a row, by kind; a plain text continues in the next row."""


class SourceStreams:
    """The training samples of a run, from all sources; a position counts samples of all of them.

    Args:
        dataset: Sources.
        stores: Shard store of each source.
        data: Packing, order and mixture.
        lengths: Lengths of rows.
        batch_rows: Rows of a global batch.
        seed: Seed of the sample order.

    Attributes:
        damage: Counter of the rows that this rank could not read.

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
    ) -> None:
        self._dataset, self._row_len = dataset, lengths.row
        self.damage = DamagePolicy(data.on_error, data.max_skipped_rows)
        self._streams = [
            _open_stream(source.index, store, data, lengths, batch_rows, seed, self.damage)
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

    def read(self, positions: range) -> TokenRows | PairRows:
        """Reads the samples at some positions. Raises: DataError: A shard is missing or damaged."""
        return self._streams[0].read(positions) if self._mixture is None else self._mixture.read(positions)

    def epochs(self, position: int) -> dict[str, float]:
        """Returns the epochs of each source before a position."""
        counts = self._counts(position).tolist()
        return {
            source.name: count / self._samples_per_epoch(stream)
            for source, stream, count in zip(self._dataset.sources, self._streams, counts, strict=True)
        }

    def too_long(self) -> list[str]:
        """Returns a message for each source with documents that do not fit a row."""
        return [
            f"{source.name}: {stream.num_too_long:,} of {source.index.splits['train'].num_documents:,} {TOO_LONG[kind]}"
            for source, stream in zip(self._dataset.sources, self._streams, strict=True)
            if isinstance(stream, BinStream) and (kind := source.index.kind) in TOO_LONG and stream.num_too_long
        ]

    def ends(self, num_samples: int) -> dict[str, int]:
        """Returns the end position of each source that ends within `num_samples` samples of the run."""
        found = sorted(self._ending.ends.items(), key=lambda item: item[1])
        return {self._dataset.sources[number].name: end for number, end in found if end < num_samples}

    def check_supply(self, num_samples: int) -> None:
        """Checks that sources suffice for a run of `num_samples`. Raises: ConfigError."""
        end = self._ending.end
        if end is not None and num_samples > end:
            raise ConfigError(
                f"data.mixture: no source is left after {end} of the run's {num_samples} samples "
                f"({end * self._row_len} tokens): {', '.join(self.ends(num_samples))} do not repeat",
                fix="lower train.steps, or set the repeat of a source to true",
            )

    def _counts(self, position: int) -> np.ndarray:
        return np.array([position]) if self._mixture is None else self._mixture.order.counts(position)

    @staticmethod
    def _samples_per_epoch(stream: TokenStream | BinStream) -> float:
        return stream.order.num_tokens / stream.order.seq_len


def open_stores(data: DataConfig, stop: Callable[[], bool]) -> list[ShardStore]:
    """Opens the shard store of each source; an address through the cache of this machine.

    Raises:
        DataError: Missing data, or other data than in its index.
        DiskError: The cache cannot be used.
        LaunchError: A package for such addresses is missing.
    """
    cache_dir, cache_bytes = Path(data.cache_dir).expanduser(), int(data.cache_gib * 2**30)
    return [open_store(path, cache_dir, cache_bytes, stop=stop) for path in data.paths]


def check_packing(index: DataIndex, data: DataConfig) -> None:
    """Checks the packing of a kind of data. Raises: ConfigError."""
    if data.packing == "concat" and index.kind != "text":
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
) -> TokenStream | BinStream:
    """Opens the validation split of a source, which is read in a fixed order."""
    if index.kind == "text":
        return TokenStream(store, index, "validation", seq_len=lengths.row, damage=damage)
    return _open_bins(index, store, data, lengths, batch_rows, "validation", damage=damage)


def _open_stream(
    index: DataIndex,
    store: ShardStore,
    data: DataConfig,
    lengths: RowLengths,
    batch_rows: int,
    seed: int,
    damage: DamagePolicy,
) -> TokenStream | BinStream:
    order: dict[str, Any] = {"seed": seed, "lanes": data.lanes, "block_samples": data.block_samples, "damage": damage}
    check_packing(index, data)
    if data.packing == "concat":
        return TokenStream(store, index, "train", seq_len=lengths.row, **order)
    return _open_bins(index, store, data, lengths, batch_rows, "train", **order)


def _open_bins(
    index: DataIndex,
    store: ShardStore,
    data: DataConfig,
    lengths: RowLengths,
    batch_rows: int,
    split: str,
    **order: Any,
) -> BinStream:
    return BinStream(
        ShardSet(store, index, split),
        seq_len=lengths.row,
        source_len=lengths.source if index.kind == "pairs" else None,
        bucket_rows=batch_rows if data.packing == "padded" else None,
        **order,
    )


def _segments(data: DataConfig, seq_len: int) -> list[tuple[int, list[float]]]:
    """Returns (first position, weights) of each stretch of the curriculum."""
    segments = [(0, [source.weight for source in data.mixture])]
    for milestone in data.curriculum:
        weights = [milestone.weights.get(source.name, 0.0) for source in data.mixture]
        segments.append((-(-milestone.tokens // seq_len), weights))
    return segments
