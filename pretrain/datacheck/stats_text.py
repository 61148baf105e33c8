"""What `pretrain data stats` counted, as tables for a terminal and as facts for JSON."""

from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pretrain.datacheck.print import print_whole
from pretrain.datacheck.stats import PERCENTILES, Lengths, SplitStats, Stats
from pretrain.shards.index import data_hash
from pretrain.tokenizer import display_tokens

TOP_TOKENS = 10
TOP_GROUPS = (10, 100, 1000)
BAR_COLUMNS = 40


def sides_of(stats: SplitStats) -> dict[str, str]:
    """Returns what the documents of each side are called."""
    return {"tokens": "targets", "source": "sources"} if "source" in stats.lengths else {"tokens": "documents"}


def stats_facts(stats: Stats) -> dict[str, Any]:
    """Returns everything as JSON has it."""
    return {
        "kind": "statistics",
        "path": stats.path,
        "data_sha256": data_hash(stats.index),
        "data_kind": stats.index.kind,
        "vocab_size": stats.index.vocab_size,
        "dtype": stats.index.dtype,
        "splits": {name: _split_facts(split, stats.tokenizer) for name, split in stats.splits.items()},
    }


def _split_facts(stats: SplitStats, tokenizer: Tokenizer) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "documents": stats.num_documents,
        "tokens": stats.num_tokens,
        "bytes_of_text": stats.num_bytes_text,
        "bytes_per_token": stats.num_bytes_text / stats.num_tokens,
        "shards": stats.num_shards,
        "members": stats.num_members,
        "bytes": stats.num_bytes,
        "lengths": {side: _length_facts(lengths) for side, lengths in stats.lengths.items()},
        "distinct_tokens": int((stats.token_counts > 0).sum()),
        "most_frequent": [
            {"id": number, "text": text, "share": share} for number, text, share in top_tokens(stats, tokenizer)
        ],
        "share_of_most_frequent": {str(count): share for count, share in group_shares(stats).items()},
        "packing": [
            {
                "seq_len": row.seq_len,
                "concat": None if row.concat_cut is None else {"full": 1.0, "cut": row.concat_cut},
                "bins": {"full": row.bins_full, "too_long": row.bins_cut, "source_full": row.bins_source_full},
            }
            for row in stats.packing
        ],
        "packing_measured_on": stats.num_packed,
    }
    if stats.num_learned is not None:
        facts["learned"] = stats.num_learned
    return facts


def _length_facts(lengths: Lengths) -> dict[str, Any]:
    return {
        "min": int(lengths.values[0]),
        "mean": lengths.mean(),
        "max": int(lengths.values[-1]),
        "percentiles": {str(percent): lengths.percentile(percent) for percent in PERCENTILES},
        "histogram": [
            {"from": first, "to": last, "documents": documents, "tokens": tokens}
            for first, last, documents, tokens in lengths.histogram()
        ],
    }


def top_tokens(stats: SplitStats, tokenizer: Tokenizer, count: int = TOP_TOKENS) -> list[tuple[int, str, float]]:
    """Returns (id, text, share of all tokens) of the most frequent tokens; of equals the lower id first."""
    order = np.argsort(-stats.token_counts, kind="stable")[:count]
    ids = [int(number) for number in order if stats.token_counts[number]]
    shares = stats.token_counts / stats.token_counts.sum()
    texts = display_tokens(tokenizer, ids)
    return [(number, text, float(shares[number])) for number, text in zip(ids, texts, strict=True)]


def group_shares(stats: SplitStats) -> dict[int, float]:
    """Returns which part of all tokens the most frequent ten, hundred and thousand are."""
    shares = np.sort(stats.token_counts)[::-1].cumsum() / stats.token_counts.sum()
    return {count: float(shares[min(count, len(shares)) - 1]) for count in TOP_GROUPS}


def print_stats(whole: Stats) -> None:
    """Prints everything, split by split."""
    print(f"{whole.path}: {whole.index.kind}, {whole.index.dtype}, vocabulary of {whole.index.vocab_size:,}")
    for name, stats in whole.splits.items():
        learned = "" if stats.num_learned is None else f", {stats.num_learned / stats.num_tokens:.1%} learned"
        print(
            f"\n{name}: {stats.num_documents:,} documents, {stats.num_tokens:,} tokens{learned}, "
            f"{stats.num_bytes_text / stats.num_tokens:.2f} bytes per token, {stats.num_shards:,} shards, "
            f"{stats.num_members:,} members, {stats.num_bytes:,} bytes"
        )
        for side, lengths in stats.lengths.items():
            print(f"\nlength of {sides_of(stats)[side]}, tokens")
            _print_percentiles(lengths)
            _print_histogram(lengths)
        _print_packing(stats)
        _print_tokens(stats, whole.tokenizer)


def _print_percentiles(lengths: Lengths) -> None:
    table = _table(["min", *(f"{percent}%" for percent in PERCENTILES), "max", "mean"])
    values = [int(lengths.values[0]), *map(lengths.percentile, PERCENTILES), int(lengths.values[-1])]
    table.add_row(*(f"{value:,}" for value in values), f"{lengths.mean():,.1f}")
    print_whole(table)


def _print_histogram(lengths: Lengths) -> None:
    rows = lengths.histogram()
    num_documents, num_tokens = sum(row[2] for row in rows), sum(row[3] for row in rows)
    most = max(row[2] for row in rows)
    table = _table(["length", "documents", "", "of documents", "of tokens"], left=(2,))
    for first, last, documents, tokens in rows:
        bar = "#" * (-(-BAR_COLUMNS * documents // most))
        shares = (f"{documents / num_documents:.1%}", f"{tokens / num_tokens:.1%}")
        table.add_row(f"{first:,}-{last:,}", f"{documents:,}", bar, *shares)
    print_whole(table)


def _print_packing(stats: SplitStats) -> None:
    partial = stats.num_packed < stats.num_documents
    print(f"\nhow full rows are{f', measured on the first {stats.num_packed:,} documents' if partial else ''}")
    columns = {"row": [f"{row.seq_len:,}" for row in stats.packing]}
    if stats.packing[0].concat_cut is not None:
        columns["concat"] = ["100.00%"] * len(stats.packing)
        columns["documents cut"] = [f"{row.concat_cut:.2%}" for row in stats.packing]
    columns["bins"] = [f"{row.bins_full:.2%}" for row in stats.packing]
    if stats.packing[0].bins_source_full is not None:
        columns["bins of sources"] = [f"{row.bins_source_full:.2%}" for row in stats.packing]
    what = "left out" if "source" in stats.lengths else "longer than a row"
    columns[what] = [f"{row.bins_cut:.2%}" for row in stats.packing]
    table = _table(list(columns))
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    print_whole(table)


def _print_tokens(stats: SplitStats, tokenizer: Tokenizer) -> None:
    used, size = int((stats.token_counts > 0).sum()), len(stats.token_counts)
    groups = ", ".join(f"{count:,} {share:.1%}" for count, share in group_shares(stats).items() if count < size)
    print(f"\n{used:,} of {size:,} tokens occur{f'; share of the most frequent: {groups}' if groups else ''}")
    table = _table(["id", "token", "share"], left=(1,))
    for number, text, share in top_tokens(stats, tokenizer):
        table.add_row(str(number), _quoted(text), f"{share:.2%}")
    print_whole(table)


def _quoted(text: str) -> str:
    """Returns a token between quotes, with its white space and control characters to be seen."""
    from rich.markup import escape

    return escape('"' + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text) + '"')


def _table(heads: list[str], left: tuple[int, ...] = ()) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place in left else "right", no_wrap=True)
    return table
