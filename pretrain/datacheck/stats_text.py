"""Tables and picture of `pretrain data stats`; tables are never cut, also on a narrow terminal."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from tokenizers import Tokenizer

from pretrain.datacheck.shard_files import shard_totals
from pretrain.datacheck.stats import LengthStats, SplitStats, Stats
from pretrain.shards.index import data_hash
from pretrain.tokenizer import display_tokens
from pretrain.tracking.picture_files import check_format, encode_figure, plain_style
from pretrain.utils.io import make_dir, write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
TOP_TOKENS = 10
TOP_GROUPS = (10, 100, 1000)
BAR_COLUMNS = 40


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = -1) -> None:
    """Prints a table in full width, with column `left` aligned to the left; a terminal wraps it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place == left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console()
    needed = Measurement.get(console, console.options.update(width=1000), table).maximum
    console.width = max(console.width, needed) if console.is_terminal else needed
    with console.capture() as printed:
        console.print(table, soft_wrap=True)
    # A box has blank lines where it has no edges.
    print("\n".join(line.rstrip() for line in printed.get().splitlines() if line.strip()))


def sides_of(stats: SplitStats) -> dict[str, str]:
    """Returns the plural noun of the documents of each side."""
    if "source" in stats.lengths:
        return {"tokens": "targets", "source": "sources"}
    return {"tokens": "documents"}


def stats_facts(stats: Stats) -> dict[str, Any]:
    """Returns the output of `--json`."""
    return {
        "kind": "statistics",
        "path": stats.path,
        "data_sha256": data_hash(stats.index),
        "data_kind": stats.index.kind,
        "vocab_size": stats.index.vocab_size,
        "dtype": stats.index.dtype,
        "splits": {name: _split_facts(one, stats.tokenizer) for name, one in stats.splits.items()},
    }


def _split_facts(stats: SplitStats, tokenizer: Tokenizer) -> dict[str, Any]:
    index = stats.index
    return {
        "documents": index.num_documents,
        "tokens": index.num_tokens,
        "bytes_of_text": index.num_bytes_text,
        "bytes_per_token": index.num_bytes_text / index.num_tokens,
        **shard_totals(index),
        "lengths": {side: _length_facts(lengths) for side, lengths in stats.lengths.items()},
        "distinct_tokens": int((stats.token_counts > 0).sum()),
        "most_frequent": [
            dict(zip(("id", "text", "share"), token, strict=True)) for token in top_tokens(stats, tokenizer)
        ],
        "share_of_most_frequent": {str(n): share for n, share in group_shares(stats).items()},
        "packing": [
            {
                "seq_len": row.seq_len,
                "concat": None if row.concat_cut is None else {"full": 1.0, "cut": row.concat_cut},
                "bins": {
                    "full": row.bins_full,
                    "too_long": row.bins_cut,
                    "source_full": row.bins_source_full,
                },
            }
            for row in stats.packing
        ],
        "packing_measured_on": stats.num_packed,
        **({} if stats.num_learned is None else {"learned": stats.num_learned}),
    }


def _length_facts(lengths: LengthStats) -> dict[str, Any]:
    return {
        "min": int(lengths.values[0]),
        "mean": lengths.mean(),
        "max": int(lengths.values[-1]),
        "percentiles": {str(percent): lengths.percentile(percent) for percent in PERCENTILES},
        "histogram": [
            dict(zip(("from", "to", "documents", "tokens"), row, strict=True)) for row in lengths.histogram()
        ],
    }


def top_tokens(stats: SplitStats, tokenizer: Tokenizer, count: int = TOP_TOKENS) -> list[tuple[int, str, float]]:
    """Returns (id, text, share) of the most frequent tokens; of equals the lower id first."""
    order = np.argsort(-stats.token_counts, kind="stable")[:count]
    ids = [int(number) for number in order if stats.token_counts[number]]
    shares = stats.token_counts / stats.token_counts.sum()
    texts = display_tokens(tokenizer, ids)
    return [(number, text, float(shares[number])) for number, text in zip(ids, texts, strict=True)]


def group_shares(stats: SplitStats) -> dict[int, float]:
    """Returns the share of all tokens that the most frequent ten, hundred and thousand have."""
    shares = np.sort(stats.token_counts)[::-1].cumsum() / stats.token_counts.sum()
    return {count: float(shares[min(count, len(shares)) - 1]) for count in TOP_GROUPS}


def print_stats(whole: Stats) -> None:
    """Prints all statistics, split by split."""
    folder = whole.index
    print(f"{whole.path}: {folder.kind}, {folder.dtype}, vocabulary of {folder.vocab_size:,}")
    for name, stats in whole.splits.items():
        index = stats.index
        learned = ""
        if stats.num_learned is not None:
            learned = f", {stats.num_learned / index.num_tokens:.1%} learned"
        totals = ", ".join(f"{number:,} {what}" for what, number in shard_totals(index).items())
        print(
            f"\n{name}: {index.num_documents:,} documents, {index.num_tokens:,} tokens{learned}, "
            f"{index.num_bytes_text / index.num_tokens:.2f} bytes per token, {totals}"
        )
        for side, lengths in stats.lengths.items():
            print(f"\nlength of {sides_of(stats)[side]}, tokens")
            low, high = lengths.values[[0, -1]].tolist()
            values = [low, *map(lengths.percentile, PERCENTILES), high]
            heads = ["min", *(f"{percent}%" for percent in PERCENTILES), "max", "mean"]
            print_table(heads, [[*(f"{value:,}" for value in values), f"{lengths.mean():,.1f}"]])
            _print_histogram(lengths)
        _print_packing(stats)
        _print_tokens(stats, whole.tokenizer)


def _print_histogram(lengths: LengthStats) -> None:
    rows = lengths.histogram()
    num_documents = lengths.counts.sum()
    num_tokens = (lengths.values * lengths.counts).sum()
    most = max(row[2] for row in rows)
    cells = [
        (
            f"{first:,}-{last:,}",
            f"{documents:,}",
            "#" * (-(-BAR_COLUMNS * documents // most)),
            f"{documents / num_documents:.1%}",
            f"{tokens / num_tokens:.1%}",
        )
        for first, last, documents, tokens in rows
    ]
    print_table(("length", "documents", "", "of documents", "of tokens"), cells, left=2)


def _print_packing(stats: SplitStats) -> None:
    part = ""
    if stats.num_packed < stats.index.num_documents:
        part = f", measured on the first {stats.num_packed:,} documents"
    print(f"\nhow full rows are{part}")
    columns = _packing_shares(stats)
    rows = [
        (f"{row.seq_len:,}", *(f"{share:.2%}" for share in shares))
        for row, *shares in zip(stats.packing, *columns.values(), strict=True)
    ]
    print_table(["row", *columns], rows)


def _packing_shares(stats: SplitStats) -> dict[str, list[float]]:
    """Returns shares of rows or documents for each row length, by what they are of."""
    shares: dict[str, list[float]] = {}
    if stats.packing[0].concat_cut is not None:
        shares["concat"] = [1.0] * len(stats.packing)
        shares["documents cut"] = [row.concat_cut or 0.0 for row in stats.packing]
    shares["bins"] = [row.bins_full for row in stats.packing]
    if stats.packing[0].bins_source_full is not None:
        shares["bins of sources"] = [row.bins_source_full or 0.0 for row in stats.packing]
    too_long = "pairs left out" if "source" in stats.lengths else "longer than a row"
    return shares | {too_long: [row.bins_cut for row in stats.packing]}


def _print_tokens(stats: SplitStats, tokenizer: Tokenizer) -> None:
    used = int((stats.token_counts > 0).sum())
    vocab_size = len(stats.token_counts)
    shares = group_shares(stats).items()
    groups = ", ".join(f"{count:,} {share:.1%}" for count, share in shares if count < vocab_size)
    most = f"; share of the most frequent: {groups}" if groups else ""
    print(f"\n{used:,} of {vocab_size:,} tokens occur{most}")
    top = top_tokens(stats, tokenizer)
    rows = [(str(number), _quoted(text), f"{share:.2%}") for number, text, share in top]
    print_table(("id", "token", "share"), rows, left=1)


def _quoted(text: str) -> str:
    """Returns a token between quotes, its white space and control characters escaped."""
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return f'"{"".join(shown)}"'


# The picture: lengths of documents and fill of rows, a line of panels for each split.

WIDTH = 11.0
ROW_HEIGHT = 3.4
DPI = 150

# Blue and orange are distinct to colour-blind readers, and in grey.
DOCUMENTS = "#0f75b9"
TOKENS = "#e07b00"
PACKING_LINES = {
    "concat": ("o-", TOKENS),
    "documents cut": ("o:", TOKENS),
    "bins": ("s-", DOCUMENTS),
    "bins of sources": ("^-", "#606060"),
    "longer than a row": ("s:", DOCUMENTS),
    "pairs left out": ("s:", DOCUMENTS),
}
MARKED = (5, 50, 95)


def draw_stats(stats: Stats, path: Path) -> None:
    """Draws a picture and writes it; the suffix is the format. Raises: ConfigError, DiskError."""
    image_format = check_format(path)
    from matplotlib.figure import Figure

    with plain_style():
        num_sides = max(len(split.lengths) for split in stats.splits.values())
        size = (WIDTH, ROW_HEIGHT * len(stats.splits))
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
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
    """Draws two bars for each power of two: its share of the documents, and of the tokens."""
    rows = np.array(lengths.histogram())
    shares = 100 * rows[:, 2:] / rows[:, 2:].sum(axis=0)
    places = np.arange(len(rows) + 1)
    axes.bar(places[:-1] - 0.2, shares[:, 0], 0.4, color=DOCUMENTS, label="of documents")
    axes.bar(places[:-1] + 0.2, shares[:, 1], 0.4, color=TOKENS, label="of tokens")
    axes.set_xticks(places - 0.5, [*map(_short, rows[:, 0].tolist()), ""])
    axes.set_xlabel("tokens", fontsize=8)
    axes.set_ylabel("%", fontsize=8)
    marks = ", ".join(f"{percent}%: {lengths.percentile(percent):,}" for percent in MARKED)
    title = f"{title}\n{marks}, max {int(lengths.values[-1]):,}"
    axes.set_title(title, fontsize=8.5, parse_math=False)
    _finish(axes)


def _draw_packing(axes: "Axes", title: str, stats: SplitStats) -> None:
    """Draws a line for each way to pack, over the row length; dotted for cut or left out documents."""
    places = range(len(stats.packing))
    for name, shares in _packing_shares(stats).items():
        style, color = PACKING_LINES[name]
        axes.plot(places, [100 * share for share in shares], style, color=color, label=name)
    axes.set_xticks(places, [f"{row.seq_len:,}" for row in stats.packing])
    axes.set_ylim(-4, 104)
    axes.set_xlabel("tokens a row", fontsize=8)
    axes.set_title(title, fontsize=8.5, parse_math=False)
    _finish(axes)


def _finish(axes: "Axes") -> None:
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7, frameon=False)
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _short(value: int) -> str:
    """Returns a power of two in few characters."""
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if value >= size:
            return f"{value // size}{unit}"
    return str(value)
