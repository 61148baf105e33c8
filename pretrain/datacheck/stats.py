"""Statistics of a shard folder: lengths, tokens, and the fill of packed rows, which needs the lengths only."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from pretrain.config.data import DataConfig
from pretrain.data.bins import pack_documents, pack_pairs
from pretrain.datacheck.progress_bar import StartPhase, Tick, no_progress, share_of
from pretrain.datacheck.reading import open_data
from pretrain.errors import DataError
from pretrain.shards.index import DataIndex
from pretrain.shards.reader import ShardSet
from pretrain.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class Packing:
    """Rows of one length.

    Attributes:
        seq_len: T; of pairs also S.
        concat_cut: Part of the documents that concat cuts, 0 to 1; its rows are always full. None: not text.
        bins_full: Part of the rows of bins that is not padding, 0 to 1; of pairs, of the target rows.
        bins_cut: Part of the documents that are longer than a row: cut, or, of pairs, left out.
        bins_source_full: The same for the source rows of pairs.
    """

    seq_len: int
    concat_cut: float | None
    bins_full: float
    bins_cut: float
    bins_source_full: float | None


class Packer:
    """Packs the shards of a split into rows of one length.

    Args:
        seq_len: T; of pairs also S.
        kind: Kind of the data.
    """

    def __init__(self, seq_len: int, kind: str) -> None:
        self._seq_len, self._kind = seq_len, kind
        self._documents = self._cut = self._too_long = self._rows = self._tokens = self._source_tokens = 0

    def add(self, lengths: np.ndarray, sources: np.ndarray | None) -> None:
        """Packs the documents of a shard."""
        room = self._seq_len
        ends = lengths.cumsum()
        self._documents += len(lengths)
        self._cut += int(((ends - lengths) // room != (ends - 1) // room).sum())
        if sources is None:
            bins = pack_documents(lengths, room)
            self._too_long += int((lengths > room).sum())
        else:
            bins = pack_pairs(sources, lengths, room, room)
            self._too_long += int(((lengths > room) | (sources > room)).sum())
            self._source_tokens += int(sources[bins.document].sum())
        self._rows += len(bins)
        self._tokens += int(bins.length.sum())

    def result(self) -> Packing:
        """Returns what was found."""
        room = max(self._rows * self._seq_len, 1)
        return Packing(
            seq_len=self._seq_len,
            concat_cut=self._cut / self._documents if self._kind == "text" else None,
            bins_full=self._tokens / room,
            bins_cut=self._too_long / self._documents,
            bins_source_full=self._source_tokens / room if self._kind == "pairs" else None,
        )


# `pretrain data stats`: what a shard folder holds, counted over all of it.
#
#     members  -> lengths of documents, and how often each token occurs
#     lengths  -> percentiles, a histogram by powers of two, and how full rows are at the usual lengths
#     tokens   -> the most frequent, and how much of the vocabulary is used
#
# Not here: tables and the picture (stats_text.py).


ROW_LENGTHS = (512, 1024, 2048, 4096)

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)

MAX_THREADS = 8

MAX_PACKED_DOCUMENTS = 1_000_000
"""How full bins are is measured on the shards that hold the first documents, about so many: packing takes two
microseconds a document and length."""

CHUNK_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class LengthStats:
    """How long documents are, on one side.

    Attributes:
        values: int64, ascending: the lengths that occur, tokens.
        counts: int64, documents of each.
    """

    values: np.ndarray
    counts: np.ndarray

    def percentile(self, percent: float) -> int:
        """Returns the shortest length that `percent` of the documents do not exceed."""
        rank = max(1, int(np.ceil(percent / 100 * self.counts.sum())))
        return int(self.values[np.searchsorted(self.counts.cumsum(), rank)])

    def mean(self) -> float:
        """Returns the mean length."""
        return float((self.values * self.counts).sum() / self.counts.sum())

    def histogram(self) -> list[tuple[int, int, int, int]]:
        """Returns (first length, last length, documents, tokens) for each power of two from the shortest on."""
        powers = np.floor(np.log2(self.values)).astype(np.int64)
        found = []
        for power in range(int(powers.min()), int(powers.max()) + 1):
            mine = powers == power
            documents, tokens = self.counts[mine].sum(), (self.values * self.counts)[mine].sum()
            found.append((2**power, 2 ** (power + 1) - 1, int(documents), int(tokens)))
        return found


@dataclass(frozen=True, slots=True)
class SplitStats:
    """One split.

    Attributes:
        num_documents: Documents.
        num_tokens: Tokens; of pairs, of the targets.
        num_bytes_text: UTF-8 bytes of the text.
        num_shards: Tars.
        num_members: Members of all tars.
        num_bytes: Bytes of all tars.
        lengths: By side: `tokens`, and of pairs `source`.
        token_counts: int64 [vocab_size], all sides.
        packing: For each of `ROW_LENGTHS`.
        num_packed: Documents that it was measured on.
        num_learned: Tokens of records in the loss mask. None: not records.
    """

    num_documents: int
    num_tokens: int
    num_bytes_text: int
    num_shards: int
    num_members: int
    num_bytes: int
    lengths: dict[str, LengthStats]
    token_counts: np.ndarray
    packing: list[Packing]
    num_packed: int
    num_learned: int | None


@dataclass(frozen=True, slots=True)
class Stats:
    """A shard folder.

    Attributes:
        path: Where it is.
        index: Index of the folder.
        tokenizer: Tokenizer of the folder.
        splits: Those that are not empty.
    """

    path: str
    index: DataIndex
    tokenizer: Tokenizer
    splits: dict[str, SplitStats]


def count_data(path: str, start_phase: StartPhase = no_progress, row_lengths: Sequence[int] = ROW_LENGTHS) -> Stats:
    """Reads all shards; about 15 ns a token and core.

    Args:
        path: What `pretrain prepare` wrote, or its address.
        start_phase: For a progress bar.
        row_lengths: For which packing is measured.

    Raises:
        DataError: A shard is missing or damaged; or there is nothing.
    """
    with open_data(DataConfig(path=path)) as (dataset, (store,)):
        index = dataset.index
        names = [name for name, split in index.splits.items() if split.num_tokens]
        if not names:
            raise DataError("holds no tokens", where=path, fix="give `pretrain prepare` more text")
        tokenizer = load_tokenizer(dataset.tokenizer_path)
        sets = [ShardSet(store, index, name) for name in names]
        tick = start_phase("shards", sum(shard.num_bytes for opened in sets for shard in opened.split.shards))
        counted = [_count_split(opened, row_lengths, tick) for opened in sets]
    return Stats(path, index, tokenizer, dict(zip(names, counted, strict=True)))


@dataclass(frozen=True, slots=True)
class _Shard:
    """What is kept of a shard: int64 lengths of its documents by side, and its token counts."""

    lengths: dict[str, np.ndarray]
    token_counts: np.ndarray
    num_learned: int


def _count_split(shards: ShardSet, row_lengths: Sequence[int], tick: Tick) -> SplitStats:
    index, split = shards.index, shards.split
    merged: dict[str, LengthStats] = {}
    token_counts, num_learned = np.zeros(index.vocab_size, dtype=np.int64), 0
    packers = {length: Packer(length, index.kind) for length in row_lengths}
    num_packed = 0
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS)) as pool:
        for shard in pool.map(lambda place: _count_shard(shards, place, tick), range(len(shards))):
            token_counts += shard.token_counts
            num_learned += shard.num_learned
            for side, lengths in shard.lengths.items():
                merged[side] = _merge(merged.get(side), lengths)
            if num_packed < MAX_PACKED_DOCUMENTS:
                num_packed += len(shard.lengths["tokens"])
                for packer in packers.values():
                    packer.add(shard.lengths["tokens"], shard.lengths.get("source"))
    return SplitStats(
        num_documents=split.num_documents,
        num_tokens=split.num_tokens,
        num_bytes_text=split.num_bytes_text,
        num_shards=len(split.shards),
        num_members=sum(shard.num_members for shard in split.shards),
        num_bytes=sum(shard.num_bytes for shard in split.shards),
        lengths=merged,
        token_counts=token_counts,
        packing=[packer.result() for packer in packers.values()],
        num_packed=num_packed,
        num_learned=num_learned if index.kind == "records" else None,
    )


def _count_shard(shards: ShardSet, place: int, tick: Tick) -> _Shard:
    reader, index, shard = shards.reader(place), shards.index, shards.split.shards[place]
    counts, num_learned = np.zeros(index.vocab_size, dtype=np.int64), 0
    sides = ("tokens", "source") if index.kind == "pairs" else ("tokens",)
    lengths: dict[str, list[np.ndarray]] = {side: [] for side in sides}
    for number in range(shard.num_members):
        for side, found in lengths.items():
            values, starts = reader.source(number) if side == "source" else reader.member(number)
            found.append(np.diff(np.append(starts.astype(np.int64), len(values))))
            for first in range(0, len(values), CHUNK_TOKENS):
                part = np.bincount(values[first : first + CHUNK_TOKENS], minlength=index.vocab_size)
                if len(part) > index.vocab_size:
                    raise DataError(
                        f"{number:08d} holds token {len(part) - 1}, the vocabulary {index.vocab_size} ids",
                        where=shard.name,
                        fix="copy this shard again or run `pretrain prepare` again",
                    )
                counts += part
        if index.kind == "records":
            num_learned += int(reader.loss(number).sum())
        tick(share_of(shard.num_bytes, shard.num_members, number))
    return _Shard({side: np.concatenate(found) for side, found in lengths.items()}, counts, num_learned)


def _merge(before: LengthStats | None, lengths: np.ndarray) -> LengthStats:
    values, counts = np.unique(lengths, return_counts=True)
    if before is None:
        return LengthStats(values, counts.astype(np.int64))
    merged, places = np.unique(np.concatenate((before.values, values)), return_inverse=True)
    totals = np.zeros(len(merged), dtype=np.int64)
    np.add.at(totals, places, np.concatenate((before.counts, counts)))
    return LengthStats(merged, totals)
