"""Statistics of a shard folder, as `pretrain data stats --json` prints them.

    length sidecars  -> percentiles, a histogram by powers of two, the fill of rows
    members          -> occurrences of each token

Not here: tables and the picture (stats_text.py).
"""

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pretrain.config.data import DataConfig
from pretrain.data.bins import pack_documents, pack_pairs
from pretrain.datacheck.hash import chunks
from pretrain.datacheck.image_data import count_images
from pretrain.datacheck.reading import open_data
from pretrain.datacheck.shard_files import FIX, MAX_THREADS, Tick, shard_totals, token_sides
from pretrain.errors import DataError
from pretrain.shards.index import data_hash
from pretrain.shards.reader import ShardSet
from pretrain.tokenizer.encoder import display_tokens
from pretrain.tokenizer.file import load_tokenizer
from pretrain.utils.status_line import transient_bar

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
ROW_LENGTHS = (512, 1024, 2048, 4096)
TOP_TOKENS = 10
TOP_GROUPS = (10, 100, 1000)
MAX_PACKED_DOCUMENTS = 1_000_000
"""About as many documents, of the first shards, are packed: two microseconds each and length."""


def count_data(path: str, row_lengths: Sequence[int] = ROW_LENGTHS) -> dict[str, Any]:
    """Reads all shards; about 15 ns a token and core. Draws a progress bar on a terminal.

    Raises:
        DataError: A shard is missing or damaged; or there is nothing.
    """
    with open_data(DataConfig(path=path)) as (dataset, (store,)), transient_bar() as bar:
        index = dataset.index
        names = [name for name, split in index.splits.items() if split.num_tokens]
        if not names:
            raise DataError("holds no tokens", where=path, fix="give `pretrain prepare` more text")
        task = bar.add_task("shards", total=shard_totals(*index.splits.values())["bytes"])
        tick = partial(bar.advance, task)
        if index.has_images:
            facts: dict[str, Any] = {
                "kind": "statistics",
                "path": path,
                "data_sha256": data_hash(index),
                "data_kind": index.kind,
            }
            if index.has_tokenizer:
                facts["vocab_size"] = index.vocab_size
            return facts | {"splits": count_images(store, index, tick)}
        tokenizer = load_tokenizer(dataset.tokenizer_path)
        splits = {name: _count_split(ShardSet(store, index, name), tokenizer, row_lengths, tick) for name in names}
    return {
        "kind": "statistics",
        "path": path,
        "data_sha256": data_hash(index),
        "data_kind": index.kind,
        "vocab_size": index.vocab_size,
        "dtype": index.dtype,
        "splits": splits,
    }


def _count_split(shards: ShardSet, tokenizer: Tokenizer, row_lengths: Sequence[int], tick: Tick) -> dict[str, Any]:
    index = shards.index
    split = shards.split
    token_counts = np.zeros(index.vocab_size, dtype=np.int64)
    num_learned = 0
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS)) as pool:
        places = range(len(shards))
        for counts, learned in pool.map(lambda place: _count_tokens(shards, place, tick), places):
            token_counts += counts
            num_learned += learned
    # Enough of the first shards for `MAX_PACKED_DOCUMENTS`.
    ends = list(accumulate(shard.num_documents for shard in split.shards))
    num_packed = min(bisect_left(ends, MAX_PACKED_DOCUMENTS) + 1, len(ends))
    facts = {
        "documents": split.num_documents,
        "tokens": split.num_tokens,
        "bytes_of_text": split.num_bytes_text,
        "bytes_per_token": split.num_bytes_text / split.num_tokens,
        **shard_totals(split),
        "lengths": {side: _describe_lengths(shards, side) for side in token_sides(index)},
        **_describe_tokens(token_counts, tokenizer),
        "packing": [_measure_packing(shards, num_packed, length) for length in row_lengths],
        "packing_measured_on": ends[num_packed - 1],
    }
    if index.layout.loss_mask:
        facts["learned"] = num_learned
    return facts


def _count_tokens(shards: ShardSet, place: int, tick: Tick) -> tuple[np.ndarray, int]:
    """Returns the occurrences of each token in a shard, int64 [vocab_size], and its learned tokens."""
    reader = shards.reader(place)
    index = shards.index
    shard = shards.split.shards[place]
    counts = np.zeros(index.vocab_size, dtype=np.int64)
    num_learned = 0
    for number in range(shard.num_members):
        sides = [reader.member(number)[0]]
        if index.layout.has_source:
            sides.append(reader.source(number)[0])
        for part in chain.from_iterable(map(chunks, sides)):
            occurrences = np.bincount(part, minlength=index.vocab_size)
            if len(occurrences) > index.vocab_size:
                text = f"{number:08d} holds token {len(occurrences) - 1}"
                text += f", the vocabulary {index.vocab_size} ids"
                raise DataError(text, where=shard.name, fix=FIX)
            counts += occurrences
        if index.layout.loss_mask:
            num_learned += int((reader.loss(number) & 1).sum())
        tick(shard.num_bytes / shard.num_members)
    return counts, num_learned


def _describe_tokens(token_counts: np.ndarray, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the most frequent tokens, of equals the lower id first, and shares of all tokens."""
    order = np.argsort(-token_counts, kind="stable")
    shares = token_counts / token_counts.sum()
    ids = [number for number in order[:TOP_TOKENS].tolist() if token_counts[number]]
    ends = np.sort(token_counts)[::-1].cumsum() / token_counts.sum()
    return {
        "distinct_tokens": int((token_counts > 0).sum()),
        "most_frequent": [
            {"id": number, "text": text, "share": float(shares[number])}
            for number, text in zip(ids, display_tokens(tokenizer, ids), strict=True)
        ],
        "share_of_most_frequent": {str(count): float(ends[min(count, len(ends)) - 1]) for count in TOP_GROUPS},
    }


def _describe_lengths(shards: ShardSet, side: str) -> dict[str, Any]:
    """Returns the lengths of documents on a side; the histogram has a bin a power of two."""
    documents = Counter[int]()
    for place in range(len(shards)):
        values, counts = np.unique(shards.lengths(place, side), return_counts=True)
        documents.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    lengths = np.array(sorted(documents))
    counts = np.array([documents[length] for length in lengths.tolist()])
    # A percentile is the shortest length that so many documents do not exceed.
    ranks = np.maximum(np.ceil(np.array(PERCENTILES) / 100 * counts.sum()), 1)
    percentiles = lengths[np.searchsorted(counts.cumsum(), ranks)].tolist()
    powers = np.floor(np.log2(lengths)).astype(np.int64)
    return {
        "min": int(lengths[0]),
        "mean": float((lengths * counts).sum() / counts.sum()),
        "max": int(lengths[-1]),
        "percentiles": dict(zip(map(str, PERCENTILES), percentiles, strict=True)),
        "histogram": [
            {
                "from": 2**power,
                "to": 2 ** (power + 1) - 1,
                "documents": int(counts[powers == power].sum()),
                "tokens": int((lengths * counts)[powers == power].sum()),
            }
            for power in range(int(powers.min()), int(powers.max()) + 1)
        ],
    }


def _measure_packing(shards: ShardSet, num_shards: int, seq_len: int) -> dict[str, Any]:
    """Packs the documents of the first shards into rows, each shard on its own as a stream does.

    Shares are 0 to 1: `full` of the tokens of rows that are no padding, `cut` and `too_long` of
    the documents. Rows of `concat`, for text only, are always full; pairs that are too long are
    left out.
    """
    cut = too_long = rows = tokens = source_tokens = 0
    layout = shards.index.layout
    for place in range(num_shards):
        lengths = shards.lengths(place).astype(np.int64)
        ends = lengths.cumsum()
        cut += int(((ends - lengths) // seq_len != (ends - 1) // seq_len).sum())
        is_long = lengths > seq_len
        if layout.has_source:
            sources = shards.lengths(place, "source").astype(np.int64)
            is_long |= sources > seq_len
            bins = pack_pairs(sources, lengths, seq_len, seq_len)
            source_tokens += int(sources[bins.document].sum())
        else:
            bins = pack_documents(lengths, seq_len, kind=shards.index.kind)
        too_long += int(is_long.sum())
        rows += len(bins)
        tokens += int(bins.length.sum())
    num_documents = sum(shard.num_documents for shard in shards.split.shards[:num_shards])
    room = max(rows * seq_len, 1)
    return {
        "seq_len": seq_len,
        "concat": {"full": 1.0, "cut": cut / num_documents} if layout.running_text else None,
        "bins": {
            "full": tokens / room,
            "too_long": too_long / num_documents,
            "source_full": source_tokens / room if layout.has_source else None,
        },
    }
