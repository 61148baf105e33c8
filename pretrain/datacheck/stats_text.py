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

from pretrain.tracking.picture_files import check_format, encode_figure, plain_style
from pretrain.utils.io import make_dir, write_file
from pretrain.utils.log import printable
from pretrain.utils.units import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def print_stats(facts: dict[str, Any]) -> None:
    """Prints the output of `count_data`, split by split."""
    print(f"{facts['path']}: {facts['data_kind']}, {facts['dtype']}, vocabulary of {facts['vocab_size']:,}")
    for name, split in facts["splits"].items():
        learned = f", {split['learned'] / split['tokens']:.1%} learned" if "learned" in split else ""
        totals = ", ".join(plural(split[f"{noun}s"], noun) for noun in ("shard", "member", "byte"))
        print(
            f"\n{name}: {plural(split['documents'], 'document')}, {plural(split['tokens'], 'token')}{learned}, "
            f"{split['bytes_per_token']:.2f} bytes per token, {totals}"
        )
        for side, lengths in split["lengths"].items():
            print(f"\nlength of {_noun(split, side)}, tokens")
            columns = {"min": lengths["min"]}
            columns |= {f"{percent}%": value for percent, value in lengths["percentiles"].items()}
            columns["max"] = lengths["max"]
            cells = [f"{value:,}" for value in columns.values()]
            print_table([*columns, "mean"], [[*cells, f"{lengths['mean']:,.1f}"]])
            _print_histogram(lengths["histogram"])
        _print_packing(split)
        _print_tokens(split, facts["vocab_size"])


def _noun(split: dict[str, Any], side: str) -> str:
    """Returns the plural of the documents of a side."""
    nouns = {"tokens": "documents"} if len(split["lengths"]) == 1 else {"tokens": "targets"}
    return nouns.get(side, "sources")


def _print_histogram(bins: list[dict[str, int]]) -> None:
    num_documents = sum(one["documents"] for one in bins)
    num_tokens = sum(one["tokens"] for one in bins)
    most = max(one["documents"] for one in bins)
    cells = [
        (
            f"{one['from']:,}-{one['to']:,}",
            f"{one['documents']:,}",
            "#" * (-(-BAR_COLUMNS * one["documents"] // most)),
            f"{one['documents'] / num_documents:.1%}",
            f"{one['tokens'] / num_tokens:.1%}",
        )
        for one in bins
    ]
    print_table(("length", "documents", "", "of documents", "of tokens"), cells, left=2)


def _print_packing(split: dict[str, Any]) -> None:
    part = ""
    if split["packing_measured_on"] < split["documents"]:
        part = f", measured on the first {split['packing_measured_on']:,} documents"
    print(f"\nhow full rows are{part}")
    columns = _packing_shares(split)
    rows = [
        (f"{row['seq_len']:,}", *(f"{share:.2%}" for share in shares))
        for row, *shares in zip(split["packing"], *columns.values(), strict=True)
    ]
    print_table(["row", *columns], rows)


def _packing_shares(split: dict[str, Any]) -> dict[str, list[float]]:
    """Returns shares of rows or documents for each row length, by the line of the picture."""
    rows = split["packing"]
    bins = [row["bins"] for row in rows]
    shares = {}
    if rows[0]["concat"] is not None:
        shares["concat"] = [row["concat"]["full"] for row in rows]
        shares["documents cut"] = [row["concat"]["cut"] for row in rows]
    shares["bins"] = [one["full"] for one in bins]
    if bins[0]["source_full"] is not None:
        shares["bins of sources"] = [one["source_full"] for one in bins]
    too_long = "pairs left out" if "source" in split["lengths"] else "longer than a row"
    return shares | {too_long: [one["too_long"] for one in bins]}


def _print_tokens(split: dict[str, Any], vocab_size: int) -> None:
    shares = split["share_of_most_frequent"].items()
    groups = ", ".join(f"{int(count):,} {share:.1%}" for count, share in shares if int(count) < vocab_size)
    most = f"; share of the most frequent: {groups}" if groups else ""
    print(f"\n{split['distinct_tokens']:,} of {vocab_size:,} tokens occur{most}")
    rows = [
        (str(token["id"]), f'"{printable(token["text"])}"', f"{token['share']:.2%}") for token in split["most_frequent"]
    ]
    print_table(("id", "token", "share"), rows, left=1)


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
MARKED = ("5", "50", "95")


def draw_stats(facts: dict[str, Any], path: Path) -> None:
    """Draws a picture of the output of `count_data`; the suffix is the format. Raises: ConfigError, DiskError."""
    image_format = check_format(path)
    from matplotlib.figure import Figure

    splits = facts["splits"]
    with plain_style():
        num_sides = max(len(split["lengths"]) for split in splits.values())
        size = (WIDTH, ROW_HEIGHT * len(splits))
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
        figure.suptitle(facts["path"], fontsize=10, parse_math=False)
        grid = figure.subplots(len(splits), num_sides + 1, squeeze=False)
        for row, (name, split) in zip(grid, splits.items(), strict=True):
            for axes, (side, lengths) in zip(row, split["lengths"].items(), strict=False):
                _draw_lengths(axes, f"{name}: length of {_noun(split, side)}", lengths)
            _draw_packing(row[-1], f"{name}: how full rows are", split)
        content = encode_figure(figure, image_format)
    make_dir(path.parent)
    write_file(path, content)


def _draw_lengths(axes: "Axes", title: str, lengths: dict[str, Any]) -> None:
    """Draws two bars for each power of two: its share of the documents, and of the tokens."""
    bins = lengths["histogram"]
    places = np.arange(len(bins) + 1)
    for side, color, noun in ((-0.2, DOCUMENTS, "documents"), (0.2, TOKENS, "tokens")):
        counts = np.array([one[noun] for one in bins])
        shares = 100 * counts / counts.sum()
        axes.bar(places[:-1] + side, shares, 0.4, color=color, label=f"of {noun}")
    axes.set_xticks(places - 0.5, [*(_short(one["from"]) for one in bins), ""])
    axes.set_xlabel("tokens", fontsize=8)
    axes.set_ylabel("%", fontsize=8)
    marks = ", ".join(f"{percent}%: {lengths['percentiles'][percent]:,}" for percent in MARKED)
    title = f"{title}\n{marks}, max {lengths['max']:,}"
    axes.set_title(title, fontsize=8.5, parse_math=False)
    _finish(axes)


def _draw_packing(axes: "Axes", title: str, split: dict[str, Any]) -> None:
    """Draws a line for each way to pack, over the row length; dotted for documents cut or left out."""
    places = range(len(split["packing"]))
    for name, shares in _packing_shares(split).items():
        style, color = PACKING_LINES[name]
        axes.plot(places, [100 * share for share in shares], style, color=color, label=name)
    axes.set_xticks(places, [f"{row['seq_len']:,}" for row in split["packing"]])
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
