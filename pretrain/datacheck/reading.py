"""Plans to read each sample once: an epoch in the order of training, or a split in its fixed order.

    a shard folder, an order  ->  ReadingPlan: number of rows, their reader, the tokens of each

Rows overlap: the last token of one is the first of the next, or belongs to the next epoch. A row
*owns* the tokens that no other row of the plan owns; all rows together own those of the split.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Any

import numpy as np

from pretrain.config.data import BLOCK_SAMPLES, LANES, DataConfig
from pretrain.config.lengths import RowLengths
from pretrain.data.bin_stream import GROUP_BATCHES
from pretrain.data.stream import SourceStreams, SplitStream, open_stores, open_windows
from pretrain.datacheck.hash import TokenSums
from pretrain.errors import ConfigError
from pretrain.kinds.layouts import LAYOUTS
from pretrain.rows import TokenRows
from pretrain.shards.dataset import ONLY, Dataset, check_tokenizers, open_dataset
from pretrain.shards.reader import ShardSet
from pretrain.shards.store import ShardStore

Read = Callable[[range], TokenRows]
Columns = tuple[np.ndarray, np.ndarray]
"""The first column that each row owns, and the one after the last: int64 [B] both."""
Owned = Callable[[TokenRows], Columns]

PACKINGS = ("concat", "bins", "padded")
MAX_MICRO = 64
STEPS = 16
"""Least steps of a plan, where there are rows enough: a kill falls between two."""

PADDED_ROWS = 48
"""Least rows of a global batch of padded rows, whose order depends on it."""


@contextlib.contextmanager
def open_data(config: DataConfig) -> Iterator[tuple[Dataset, Sequence[ShardStore]]]:
    """Opens the sources of a config, folders or addresses through the cache, and their stores.

    Raises:
        DataError: A folder, an index or a file is missing, or has another size than in the index; a
            tokenizer is not the one that made the shards; or the sources do not go together.
        DiskError: The cache cannot be used.
        LaunchError: A package that reads such addresses is missing.
    """
    stores = open_stores(config, lambda: False)
    try:
        folders = {path: store.folder for path, store in zip(config.paths, stores, strict=True)}
        dataset = open_dataset(config, folders.__getitem__)
        for store in stores:
            store.check()
        check_tokenizers(dataset)
        yield dataset, stores
    finally:
        for store in stores:
            store.close()


@dataclass(frozen=True, slots=True)
class Order:
    """Options of `pretrain data verify` for `data` and `batch`; None: chosen by the data."""

    seq_len: int = 1024
    source_len: int | None = None
    packing: str | None = None
    lanes: int = LANES
    block_samples: int = BLOCK_SAMPLES
    seed: int = 1234

    def data(self, path: str, kind: str) -> DataConfig:
        """Returns the section of a config. Raises: ConfigError: There is no such packing."""
        if self.packing not in (None, *PACKINGS):
            raise ConfigError(
                f"there is no packing {self.packing!r}",
                fix=f"use {', '.join(PACKINGS)}",
            )
        values: dict[str, Any] = {"packing": self.packing or LAYOUTS[kind].packing}
        return DataConfig(path=path, lanes=self.lanes, block_samples=self.block_samples, **values)


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    """Rows to be read, each sample once."""

    name: str
    num_samples: int  # samples 0 to this
    num_rows: int  # that contain them all; rows beyond `num_samples` are of the next epoch
    batch_rows: int
    num_tokens: int  # of the split that lie in rows; of pairs, target tokens
    token_sum: int  # over these tokens, below 2**64 (hash.py)
    num_left_out: int  # documents that are longer than a row, and in none, or without their rest
    open: Callable[[], Read]  # as a rank does at its start; the result reads rows by position
    owned: Owned


def plan_rows(num_samples: int, world_sizes: Sequence[int]) -> int:
    """Returns rows of a global batch that all world sizes divide, for `STEPS` steps if possible."""
    quantum = lcm(*world_sizes)
    most = -(-MAX_MICRO * max(world_sizes) // quantum)
    return quantum * max(1, min(num_samples // (STEPS * quantum), most))


def plan_reading(
    dataset: Dataset,
    store: ShardStore,
    split: str,
    order: Order,
    world_sizes: Sequence[int],
    token_sum: int,
) -> ReadingPlan:
    """Returns the plan of the first epoch of `train`, or of `validation` in its fixed order.

    The dataset has one source; `token_sum` is that of the split (hash.py).

    Raises:
        ConfigError: A packing that the kind of data does not have.
        DataError: The split is empty or damaged, or no document fits a row.
    """
    index = dataset.index
    data = order.data(str(store.folder), index.kind)
    lengths = RowLengths(order.seq_len, order.seq_len, order.source_len or order.seq_len)
    quantum = lcm(*world_sizes)
    padded_rows = quantum * -(-PADDED_ROWS // quantum)
    num_tokens = index.split(split).num_tokens

    def open_train() -> SourceStreams:
        return SourceStreams(dataset, [store], data, lengths, padded_rows, order.seed)

    def open_validation() -> SplitStream:
        return open_windows(index, store, data, lengths, PADDED_ROWS)

    is_train = split == "train"
    is_cut = index.layout.running_text and (data.packing == "concat" or not is_train)
    if not is_train:
        num_samples = open_validation().num_windows()
    elif is_cut:
        num_samples = -(-num_tokens // order.seq_len)
    else:  # a bin is this part of an epoch
        num_samples = round(1 / open_train().epochs(1)[ONLY])
    batch_rows = plan_rows(num_samples, world_sizes)
    num_rows = num_samples
    if is_train and data.packing == "padded":
        batch_rows = padded_rows
        num_rows = -(-num_samples // (GROUP_BATCHES * batch_rows)) * GROUP_BATCHES * batch_rows
    owned: Owned = partial(_owned_by_documents, num_samples)
    if is_cut:
        owned = _owned_by_windows
        if is_train:
            owned = partial(_owned_by_samples, num_tokens, order.seq_len)
    num_left_out = 0
    if index.layout.leaves_out or index.layout.beginning:
        shards = ShardSet(store, index, split)
        num_left_out, num_tokens, token_sum = _leave_out(shards, lengths, token_sum)
    return ReadingPlan(
        name=f"train, {data.packing}" if is_train else "validation, fixed",
        num_samples=num_samples,
        num_rows=num_rows,
        batch_rows=batch_rows,
        num_tokens=num_tokens,
        token_sum=token_sum,
        num_left_out=num_left_out,
        open=lambda: open_train().read if is_train else open_validation().read_windows,
        owned=owned,
    )


def _leave_out(shards: ShardSet, lengths: RowLengths, token_sum: int) -> tuple[int, int, int]:
    """Returns the documents that do not fit a row, and the split's tokens and sum without theirs."""
    num_left_out = 0
    num_tokens = shards.split.num_tokens
    sums = TokenSums(shards.index.vocab_size)
    # By the lengths of documents, independently of the stream.
    for number in range(len(shards)):
        is_long = shards.lengths(number) > lengths.row
        if shards.index.layout.has_source:
            is_long |= shards.lengths(number, "source") > lengths.source
        for document in np.flatnonzero(is_long).tolist():
            member, first, length = shards.reader(number).locate(document)
            values, _ = shards.reader(number).member(member)
            if shards.index.layout.beginning:
                first, length = first + lengths.row, length - lengths.row
            num_left_out += 1
            num_tokens -= length
            token_sum -= sums(values[first : first + length])
    return num_left_out, num_tokens, token_sum % 2**64


def _owned_by_samples(num_tokens: int, seq_len: int, rows: TokenRows) -> Columns:
    """Returns the epoch's inputs: the tokens behind them in its last row are the next epoch's."""
    remaining = num_tokens - rows.sample_ids_B * seq_len
    return np.zeros_like(remaining), np.clip(remaining, 0, seq_len)


def _owned_by_windows(rows: TokenRows) -> Columns:
    """Returns the targets, and the first token of all, which is no target."""
    assert rows.num_tokens_B is not None, "windows count their real tokens"
    return (rows.sample_ids_B > 0).astype(np.int64), rows.num_tokens_B


def _owned_by_documents(num_samples: int, rows: TokenRows) -> Columns:
    """Returns whole documents: a token beyond the row, the target of its last, is the next's."""
    assert rows.num_tokens_B is not None, "rows of documents count their real tokens"
    num_tokens = np.where(rows.sample_ids_B < num_samples, rows.num_tokens_B, 0)
    return np.zeros_like(num_tokens), np.minimum(num_tokens, rows.tokens_BT.shape[1] - 1)
