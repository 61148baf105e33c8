"""Tables and picture of `pretrain data stats`; tables are never cut, also on a narrow terminal."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from pretrain.datacheck.stats import PERCENTILES, LengthStats, SplitStats, Stats
from pretrain.shards.index import data_hash
from pretrain.tokenizer import display_tokens
from pretrain.tracking.picture_files import check_format, encode_figure, plain_style
from pretrain.utils.io import make_dir, write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table


def print_whole(table: "Table") -> None:
    """Prints a table to standard output as wide as it is; what exceeds the terminal, the terminal wraps."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console()
    needed = Measurement.get(console, console.options.update(width=1000), table).maximum
    console.width = max(console.width, needed) if console.is_terminal else needed
    with console.capture() as printed:
        console.print(table, soft_wrap=True)
    # A box has blank lines where it has no edges.
    print("\n".join(line.rstrip() for line in printed.get().splitlines() if line.strip()))


# What `pretrain data stats` counted, as tables for a terminal and as facts for JSON.


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


def _length_facts(lengths: LengthStats) -> dict[str, Any]:
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


def _print_percentiles(lengths: LengthStats) -> None:
    table = _table(["min", *(f"{percent}%" for percent in PERCENTILES), "max", "mean"])
    values = [int(lengths.values[0]), *map(lengths.percentile, PERCENTILES), int(lengths.values[-1])]
    table.add_row(*(f"{value:,}" for value in values), f"{lengths.mean():,.1f}")
    print_whole(table)


def _print_histogram(lengths: LengthStats) -> None:
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


# A picture of a shard folder: how long its documents are, and how full rows are, a line of panels
# for each split.


WIDTH, ROW_HEIGHT, DPI = 11.0, 3.4, 150

DOCUMENTS, TOKENS, GREY = "#0f75b9", "#e07b00", "#606060"
"""Blue and orange: distinct to colour-blind readers, and in grey."""

MARKED = (5, 50, 95)


def draw_stats(stats: Stats, path: Path) -> None:
    """Draws a picture and writes it.

    Args:
        stats: What to draw.
        path: File to write; the suffix is the format: .png, .svg or .pdf.

    Raises:
        ConfigError: Another suffix.
        DiskError: The disk refused.
    """
    image_format = check_format(path)
    from matplotlib.figure import Figure

    with plain_style():
        num_sides = max(len(split.lengths) for split in stats.splits.values())
        figure = Figure(figsize=(WIDTH, ROW_HEIGHT * len(stats.splits)), dpi=DPI, layout="constrained")
        figure.suptitle(stats.path, fontsize=10, parse_math=False)
        grid = figure.subplots(len(stats.splits), num_sides + 1, squeeze=False)
        for row, (name, split) in zip(grid, stats.splits.items(), strict=True):
            for axes, (side, lengths) in zip(row, split.lengths.items(), strict=False):
                _draw_lengths(axes, f"{name}: length of {sides_of(split)[side]}", lengths)
            _draw_packing(row[-1], f"{name}: how full rows are", split)
        content = encode_figure(figure, image_format)
    make_dir(path.parent)
    write_file(path, content)


def _draw_lengths(axes: "Axes", title: str, lengths: LengthStats) -> None:
    """Bars for each power of two: the share of the documents, and of the tokens."""
    rows = lengths.histogram()
    num_documents, num_tokens = sum(row[2] for row in rows), sum(row[3] for row in rows)
    places = range(len(rows))
    shares = ([100 * row[2] / num_documents for row in rows], [100 * row[3] / num_tokens for row in rows])
    axes.bar([place - 0.2 for place in places], shares[0], 0.4, color=DOCUMENTS, label="of documents")
    axes.bar([place + 0.2 for place in places], shares[1], 0.4, color=TOKENS, label="of tokens")
    axes.set_xticks([place - 0.5 for place in [*places, len(rows)]], [_short(row[0]) for row in rows] + [""])
    axes.set_xlabel("tokens", fontsize=8)
    axes.set_ylabel("%", fontsize=8)
    marks = ", ".join(f"{percent}%: {lengths.percentile(percent):,}" for percent in MARKED)
    axes.set_title(f"{title}\n{marks}, max {int(lengths.values[-1]):,}", fontsize=8.5, parse_math=False)
    _finish(axes)


def _draw_packing(axes: "Axes", title: str, stats: SplitStats) -> None:
    """A line for each way to pack, over the row length; dotted: the documents that are cut or left out."""
    lengths = [row.seq_len for row in stats.packing]
    places = range(len(lengths))
    if stats.packing[0].concat_cut is not None:
        axes.plot(places, [100.0] * len(lengths), "o-", color=TOKENS, label="concat")
        cut = [100 * (row.concat_cut or 0.0) for row in stats.packing]
        axes.plot(places, cut, "o:", color=TOKENS, label="concat: documents cut")
    axes.plot(places, [100 * row.bins_full for row in stats.packing], "s-", color=DOCUMENTS, label="bins")
    if stats.packing[0].bins_source_full is not None:
        sources = [100 * (row.bins_source_full or 0.0) for row in stats.packing]
        axes.plot(places, sources, "^-", color=GREY, label="bins: sources")
    too_long = [100 * row.bins_cut for row in stats.packing]
    what = "pairs left out" if "source" in stats.lengths else "documents longer than a row"
    axes.plot(places, too_long, "s:", color=DOCUMENTS, label=what)
    axes.set_xticks(places, [f"{length:,}" for length in lengths])
    axes.set_ylim(-4, 104)
    axes.set_xlabel("tokens a row", fontsize=8)
    axes.set_title(title, fontsize=8.5, parse_math=False)
    _finish(axes)


def _finish(axes: "Axes") -> None:
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7, frameon=False)
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _short(value: int) -> str:
    """Returns a power of two in few characters."""
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if value >= size:
            return f"{value // size}{unit}"
    return str(value)
