"""Statistics of a shard folder: lengths, tokens, and the fill of packed rows.

    length sidecars  -> percentiles, a histogram by powers of two, the fill of rows
    members          -> occurrences of each token

Not here: tables and the picture (stats_text.py).
"""

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, product

import numpy as np
from tokenizers import Tokenizer

from pretrain.config.data import DataConfig
from pretrain.data.bins import pack_documents, pack_pairs
from pretrain.datacheck.hash import chunks
from pretrain.datacheck.reading import open_data
from pretrain.datacheck.shard_files import FIX, MAX_THREADS, Tick, shard_totals, token_sides
from pretrain.errors import DataError
from pretrain.shards.index import DataIndex, SplitIndex
from pretrain.shards.reader import ShardSet
from pretrain.tokenizer import load_tokenizer
from pretrain.utils.log import transient_bar

ROW_LENGTHS = (512, 1024, 2048, 4096)

MAX_PACKED_DOCUMENTS = 1_000_000
"""About as many documents, of the first shards, are packed: two microseconds each and length."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Packing of documents into rows of `seq_len` tokens, also of sources. Shares are 0 to 1."""

    seq_len: int
    concat_cut: float | None  # documents that concat cuts; its rows are always full; None: not text
    bins_full: float  # tokens of the rows of bins that are no padding; of pairs, of the target rows
    bins_cut: float  # documents that are longer than a row: cut, or, of pairs, left out
    bins_source_full: float | None  # tokens of the source rows of pairs that are no padding


def measure_packing(shards: ShardSet, num_shards: int, seq_len: int) -> Packing:
    """Packs the documents of the first shards, each on its own as a stream does."""
    cut = too_long = rows = tokens = source_tokens = 0
    for place in range(num_shards):
        lengths = shards.lengths(place).astype(np.int64)
        ends = lengths.cumsum()
        cut += int(((ends - lengths) // seq_len != (ends - 1) // seq_len).sum())
        is_long = lengths > seq_len
        if shards.index.kind == "pairs":
            sources = shards.lengths(place, "source").astype(np.int64)
            is_long |= sources > seq_len
            bins = pack_pairs(sources, lengths, seq_len, seq_len)
            source_tokens += int(sources[bins.document].sum())
        else:
            bins = pack_documents(lengths, seq_len)
        too_long += int(is_long.sum())
        rows += len(bins)
        tokens += int(bins.length.sum())
    num_documents = sum(shard.num_documents for shard in shards.split.shards[:num_shards])
    room = max(rows * seq_len, 1)
    return Packing(
        seq_len=seq_len,
        concat_cut=cut / num_documents if shards.index.kind == "text" else None,
        bins_full=tokens / room,
        bins_cut=too_long / num_documents,
        bins_source_full=source_tokens / room if shards.index.kind == "pairs" else None,
    )


class LengthStats:
    """Lengths of documents on one side: ascending, int64, with the documents of each, int64."""

    def __init__(self, documents: Counter[int]) -> None:
        self.values = np.array(sorted(documents))
        self.counts = np.array([documents[length] for length in self.values.tolist()])

    def percentile(self, percent: float) -> int:
        """Returns the shortest length that `percent` of the documents do not exceed."""
        rank = max(1, int(np.ceil(percent / 100 * self.counts.sum())))
        return int(self.values[np.searchsorted(self.counts.cumsum(), rank)])

    def mean(self) -> float:
        """Returns the mean length."""
        return float((self.values * self.counts).sum() / self.counts.sum())

    def histogram(self) -> list[tuple[int, int, int, int]]:
        """Returns (first length, last length, documents, tokens) for each power of two."""
        powers = np.floor(np.log2(self.values)).astype(np.int64)
        found = []
        for power in range(int(powers.min()), int(powers.max()) + 1):
            mine = powers == power
            documents = int(self.counts[mine].sum())
            tokens = int((self.values * self.counts)[mine].sum())
            found.append((2**power, 2 ** (power + 1) - 1, documents, tokens))
        return found


@dataclass(frozen=True, slots=True)
class SplitStats:
    """One split."""

    index: SplitIndex
    lengths: dict[str, LengthStats]  # by side: `tokens`, and of pairs `source`
    token_counts: np.ndarray  # int64 [vocab_size], all sides
    packing: list[Packing]  # for each of `ROW_LENGTHS`
    num_packed: int  # documents that it was measured on
    num_learned: int | None  # tokens of records in the loss mask; None: not records


@dataclass(frozen=True, slots=True)
class Stats:
    """A shard folder at `path`, with the splits that are not empty."""

    path: str
    index: DataIndex
    tokenizer: Tokenizer
    splits: dict[str, SplitStats]


def count_data(path: str, row_lengths: Sequence[int] = ROW_LENGTHS) -> Stats:
    """Reads all shards; about 15 ns a token and core. Draws a progress bar on a terminal.

    Raises:
        DataError: A shard is missing or damaged; or there is nothing.
    """
    with open_data(DataConfig(path=path)) as (dataset, (store,)), transient_bar() as bar:
        index = dataset.index
        names = [name for name, split in index.splits.items() if split.num_tokens]
        if not names:
            raise DataError("holds no tokens", where=path, fix="give `pretrain prepare` more text")
        tokenizer = load_tokenizer(dataset.tokenizer_path)
        task = bar.add_task("shards", total=shard_totals(*index.splits.values())["bytes"])
        tick = partial(bar.advance, task)
        counted = {name: _count_split(ShardSet(store, index, name), row_lengths, tick) for name in names}
    return Stats(path, index, tokenizer, counted)


def _count_split(shards: ShardSet, row_lengths: Sequence[int], tick: Tick) -> SplitStats:
    index = shards.index
    token_counts = np.zeros(index.vocab_size, dtype=np.int64)
    num_learned = 0
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS)) as pool:
        places = range(len(shards))
        for counts, learned in pool.map(lambda place: _count_tokens(shards, place, tick), places):
            token_counts += counts
            num_learned += learned
    documents = {side: Counter[int]() for side in token_sides(index.kind)}
    for place, side in product(range(len(shards)), documents):
        values, counts = np.unique(shards.lengths(place, side), return_counts=True)
        documents[side].update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    # Enough of the first shards for `MAX_PACKED_DOCUMENTS`.
    ends = list(accumulate(shard.num_documents for shard in shards.split.shards))
    num_shards = min(bisect_left(ends, MAX_PACKED_DOCUMENTS) + 1, len(ends))
    return SplitStats(
        index=shards.split,
        lengths={side: LengthStats(counter) for side, counter in documents.items()},
        token_counts=token_counts,
        packing=[measure_packing(shards, num_shards, length) for length in row_lengths],
        num_packed=ends[num_shards - 1],
        num_learned=num_learned if index.kind == "records" else None,
    )


def _count_tokens(shards: ShardSet, place: int, tick: Tick) -> tuple[np.ndarray, int]:
    """Returns the occurrences of each token in a shard, int64 [vocab_size], and its learned tokens."""
    reader = shards.reader(place)
    index = shards.index
    shard = shards.split.shards[place]
    counts = np.zeros(index.vocab_size, dtype=np.int64)
    num_learned = 0
    for number in range(shard.num_members):
        sides = [reader.member(number)[0]]
        if index.kind == "pairs":
            sides.append(reader.source(number)[0])
        for part in chain.from_iterable(map(chunks, sides)):
            found = np.bincount(part, minlength=index.vocab_size)
            if len(found) > index.vocab_size:
                what = f"{number:08d} holds token {len(found) - 1}, the vocabulary {index.vocab_size} ids"
                raise DataError(what, where=shard.name, fix=FIX)
            counts += found
        if index.kind == "records":
            num_learned += int(reader.loss(number).sum())
        tick(shard.num_bytes / shard.num_members)
    return counts, num_learned
