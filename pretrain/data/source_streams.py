"""From the sources of a run to one stream of rows: packed as the config says, and mixed where there are several.

    Dataset -> a stream for each source -> SourceStreams.read(positions) -> rows
                                        -> SourceStreams.epochs(position) -> how often each source has been read

The position of a run counts samples of all sources. Not here: batches and ranks (loader.py).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.config.data import DataConfig
from pretrain.config.lengths import RowLengths
from pretrain.data.bin_stream import BinStream
from pretrain.data.damage import DamagePolicy
from pretrain.data.mixture import MixtureOrder
from pretrain.data.mixture_end import Ending, end_sources
from pretrain.data.mixture_stream import MixtureStream
from pretrain.data.stream import TokenStream
from pretrain.errors import ConfigError
from pretrain.rows import PairRows, TokenRows
from pretrain.shards.dataset import Dataset
from pretrain.shards.index import DataIndex
from pretrain.shards.shard_set import ShardSet
from pretrain.shards.store import ShardStore, open_store

TOO_LONG = {
    "pairs": "pairs are longer than batch.source_len or batch.seq_len, and left out",
    "records": "records are longer than batch.seq_len, and cut: the rest is learned without its prompt",
    "classes": "texts are longer than batch.seq_len, and cut: only their beginning is learned from",
    "tags": "texts are longer than batch.seq_len, and cut",
}
"""What becomes of documents that are longer than a row, by kind; a plain text goes on in the next."""


class SourceStreams:
    """The training samples of a run.

    Args:
        dataset: The sources.
        stores: Where the shards of each are.
        data: How they are packed, ordered and mixed.
        lengths: Of rows.
        batch_rows: Rows of a global batch.
        seed: Of the order.

    Attributes:
        damage: Counts the rows that this rank could not read.

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
        self._ending = Ending([(0, [1.0])], {}, None)
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
        """Returns how many epochs of each source the samples before a position are."""
        counts = self._counts(position).tolist()
        return {
            source.name: count / self._samples_per_epoch(stream)
            for source, stream, count in zip(self._dataset.sources, self._streams, counts, strict=True)
        }

    def too_long(self) -> list[str]:
        """Says of each source whose documents belong together how many of them do not fit a row, where any do not."""
        return [
            f"{source.name}: {stream.num_too_long:,} of {source.index.splits['train'].num_documents:,} {TOO_LONG[kind]}"
            for source, stream in zip(self._dataset.sources, self._streams, strict=True)
            if isinstance(stream, BinStream) and (kind := source.index.kind) in TOO_LONG and stream.num_too_long
        ]

    def ends(self, num_samples: int) -> dict[str, int]:
        """Returns after how many samples of the run each source ends, of those that do within `num_samples`."""
        found = sorted(self._ending.ends.items(), key=lambda item: item[1])
        return {self._dataset.sources[number].name: end for number, end in found if end < num_samples}

    def check_supply(self, num_samples: int) -> None:
        """Refuses a run of so many samples for which sources that do not repeat are not enough.

        Raises:
            ConfigError: Names the samples after which the last one ends.
        """
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
    """Opens where the shards of each source are; an address through the cache of this machine.

    Raises:
        DataError: There is no such data, or it is not as its index says.
        DiskError: The cache cannot be used.
        LaunchError: A package that reads such addresses is missing.
    """
    cache_dir, cache_bytes = Path(data.cache_dir).expanduser(), int(data.cache_gib * 2**30)
    return [open_store(path, cache_dir, cache_bytes, stop=stop) for path in data.paths]


def check_packing(index: DataIndex, data: DataConfig) -> None:
    """Raises: ConfigError: The kind of data cannot be packed so."""
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
