"""Plans of what is read exactly once: an epoch in the order of training, or a split in its fixed order.

    a shard folder, an order  ->  Course: how many rows there are, how a rank opens them, which tokens each row owns

Rows overlap: the last token of one is the first of the next, or belongs to the next epoch. A row *owns* the tokens that
no other row of the course owns, so those of all rows are the tokens of the split.
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
from pretrain.data.stream import SourceStreams, TokenStream, open_stores, open_windows
from pretrain.datacheck.hash import TokenSums
from pretrain.errors import ConfigError
from pretrain.rows import PairRows, TokenRows
from pretrain.shards.dataset import ONLY, Dataset, check_tokenizers, open_dataset
from pretrain.shards.reader import ShardSet
from pretrain.shards.store import ShardStore

Read = Callable[[range], TokenRows | PairRows]
Owned = Callable[[TokenRows], tuple[np.ndarray, np.ndarray]]
"""Returns the first column that each row owns, and the one after the last: int64 [B] both."""

PACKINGS = ("concat", "bins", "padded")
MAX_MICRO = 64
STEPS = 16
"""A course has at least so many steps, where there are rows enough: a kill falls between two."""

PADDED_ROWS = 48
"""Of a global batch of padded rows, about: their order depends on it."""


@contextlib.contextmanager
def open_data(config: DataConfig) -> Iterator[tuple[Dataset, Sequence[ShardStore]]]:
    """Opens the sources of a config, local folders or addresses through the cache, and the store of each.

    Raises:
        DataError: A folder, an index or a file is missing, or not of the size that the index says; a tokenizer is not
            the one that made the shards; or the sources do not go together.
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
    """How samples are made and ordered; keys of `data` and `batch`.

    Attributes:
        seq_len: Tokens of a row, T.
        source_len: Pairs: tokens of a source row, S. None: as `seq_len`.
        packing: One of `PACKINGS`. None: what suits the kind of data.
        lanes: See data/order.py.
        block_samples: See data/order.py.
        seed: Seed of the sample order.
    """

    seq_len: int = 1024
    source_len: int | None = None
    packing: str | None = None
    lanes: int = LANES
    block_samples: int = BLOCK_SAMPLES
    seed: int = 1234

    def data(self, path: str, kind: str) -> DataConfig:
        """Returns the section of a config. Raises: ConfigError: There is no such packing."""
        if self.packing not in (None, *PACKINGS):
            raise ConfigError(f"there is no packing {self.packing!r}", fix=f"use {', '.join(PACKINGS)}")
        values: dict[str, Any] = {"packing": self.packing or choose_packing(kind)}
        return DataConfig(path=path, lanes=self.lanes, block_samples=self.block_samples, **values)

    @property
    def lengths(self) -> RowLengths:
        """Tokens of rows that no objective has changed."""
        return RowLengths(self.seq_len, self.seq_len, self.source_len or self.seq_len)


def choose_packing(kind: str) -> str:
    """Returns the packing that suits a kind of data: `concat` for text, and `bins` for what must not be cut."""
    return "concat" if kind == "text" else "bins"


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    """Rows to be read.

    Attributes:
        name: What it is.
        num_samples: Samples 0 to this come once each.
        num_rows: After so many rows all of them have come; where these are more, the others are of the next epoch.
        batch_rows: Rows of a global batch.
        num_tokens: Tokens of the split that lie in rows; of pairs, target tokens.
        token_sum: Sum over these tokens, less than 2**64 (hash.py).
        num_left_out: Pairs that are longer than a row, and in none.
        open: Opens it as a rank does that has just started; what comes back reads rows by position.
        owned: Which columns a row owns.
    """

    name: str
    num_samples: int
    num_rows: int
    batch_rows: int
    num_tokens: int
    token_sum: int
    num_left_out: int
    open: Callable[[], Read]
    owned: Owned


def plan_rows(num_samples: int, world_sizes: Sequence[int]) -> int:
    """Returns the rows of a global batch, which all world sizes divide, for at least `STEPS` steps where possible."""
    quantum = lcm(*world_sizes)
    return quantum * max(1, min(num_samples // (STEPS * quantum), -(-MAX_MICRO * max(world_sizes) // quantum)))


def train_course(
    dataset: Dataset, store: ShardStore, path: str, order: Order, world_sizes: Sequence[int], token_sum: int
) -> ReadingPlan:
    """Returns the first epoch of the training split, as a run reads it.

    Args:
        dataset: One source.
        store: Where its shards are.
        path: What the user calls it.
        order: How it is read.
        world_sizes: Numbers of ranks that will read it.
        token_sum: Token sum of the split.

    Raises:
        ConfigError: A packing that the kind of data does not have.
        DataError: The split is empty or damaged, or no document fits a row.
    """
    index = dataset.index
    data, num_tokens = order.data(path, index.kind), index.split("train").num_tokens
    quantum = lcm(*world_sizes)
    rows = quantum * -(-PADDED_ROWS // quantum)
    samples = SourceStreams(dataset, [store], data, order.lengths, rows, order.seed)
    if data.packing == "concat":
        num_samples = -(-num_tokens // order.seq_len)
    else:  # a bin is this part of an epoch
        num_samples = round(1 / samples.epochs(1)[ONLY])
    num_rows = num_samples
    if data.packing == "padded":
        num_rows = -(-num_samples // (GROUP_BATCHES * rows)) * GROUP_BATCHES * rows
    else:
        rows = plan_rows(num_samples, world_sizes)
    num_left_out = 0
    if index.kind == "pairs":
        num_left_out, num_tokens, token_sum = _fitting(ShardSet(store, index, "train"), order, token_sum)
    owned = partial(_owned_by_documents, num_samples)
    if data.packing == "concat":
        owned = partial(_owned_by_samples, num_tokens, order.seq_len)
    return ReadingPlan(
        name=f"train, {data.packing}",
        num_samples=num_samples,
        num_rows=num_rows,
        batch_rows=rows,
        num_tokens=num_tokens,
        token_sum=token_sum,
        num_left_out=num_left_out,
        open=lambda: SourceStreams(dataset, [store], data, order.lengths, rows, order.seed).read,
        owned=owned,
    )


def validation_course(
    dataset: Dataset, store: ShardStore, path: str, order: Order, world_sizes: Sequence[int], token_sum: int
) -> ReadingPlan:
    """Returns the validation split in its fixed order. Arguments and errors as of `train_course`."""
    index = dataset.index
    data = order.data(path, index.kind)
    stream = open_windows(index, store, data, order.lengths, PADDED_ROWS)
    num_samples, num_tokens = stream.num_windows(), index.split("validation").num_tokens
    num_left_out = 0
    if index.kind == "pairs":
        num_left_out, num_tokens, token_sum = _fitting(ShardSet(store, index, "validation"), order, token_sum)
    return ReadingPlan(
        name="validation, fixed",
        num_samples=num_samples,
        num_rows=num_samples,
        batch_rows=plan_rows(num_samples, world_sizes),
        num_tokens=num_tokens,
        token_sum=token_sum,
        num_left_out=num_left_out,
        open=lambda: open_windows(index, store, data, order.lengths, PADDED_ROWS).read_windows,
        owned=_owned_by_windows if isinstance(stream, TokenStream) else partial(_owned_by_documents, num_samples),
    )


def _fitting(shards: ShardSet, order: Order, token_sum: int) -> tuple[int, int, int]:
    """Returns how many pairs do not fit a row, and tokens and token sum of the split without their targets.

    Computed from the lengths of documents, independently of the stream.
    """
    room, source_room = order.seq_len, order.source_len or order.seq_len
    num_left_out, num_tokens, sums = 0, shards.split.num_tokens, TokenSums(shards.index.vocab_size)
    for number in range(len(shards)):
        targets, sources = (shards.lengths(number, side) for side in ("tokens", "source"))
        (too_long,) = np.nonzero((targets > room) | (sources > source_room))
        num_left_out += len(too_long)
        for document in too_long.tolist():
            member, first, length = shards.reader(number).locate(document)
            values, _ = shards.reader(number).member(member)
            num_tokens, token_sum = num_tokens - length, token_sum - sums(values[first : first + length])
    return num_left_out, num_tokens, token_sum % 2**64


def _owned_by_samples(num_tokens: int, seq_len: int, rows: TokenRows) -> tuple[np.ndarray, np.ndarray]:
    """The epoch's inputs: what follows in its last row is the next epoch's."""
    left = num_tokens - rows.sample_ids * seq_len
    return np.zeros_like(left), np.clip(left, 0, seq_len)


def _owned_by_windows(rows: TokenRows) -> tuple[np.ndarray, np.ndarray]:
    """The targets, and the first token of all, which is no target."""
    assert rows.num_tokens is not None, "windows tell how many tokens are real"
    return (rows.sample_ids > 0).astype(np.int64), rows.num_tokens


def _owned_by_documents(num_samples: int, rows: TokenRows) -> tuple[np.ndarray, np.ndarray]:
    """Whole documents; a token beyond the row, the target of its last, is the next row's."""
    assert rows.num_tokens is not None, "rows of documents tell how many tokens are real"
    own = np.where(rows.sample_ids < num_samples, rows.num_tokens, 0)
    return np.zeros_like(own), np.minimum(own, rows.tokens.shape[1] - 1)
