"""A picture of a shard folder: how long its documents are, and how full rows are, a line of panels for each split."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.datacheck.stats import Lengths, SplitStats, Stats
from pretrain.datacheck.stats_text import sides_of
from pretrain.utils.io import make_dir, write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, ROW_HEIGHT, DPI = 11.0, 3.4, 150
DOCUMENTS, TOKENS, GREY = "#0f75b9", "#e07b00", "#606060"
"""Blue and orange: told apart by any eye, and in grey."""

MARKED = (5, 50, 95)


def check_picture(path: Path) -> str:
    """Returns the format of a picture by the end of its name. Raises: ConfigError: There is none of that name."""
    from pretrain.attention_maps.figure import check_format  # which imports torch

    return check_format(path)


def draw_stats(stats: Stats, path: Path) -> None:
    """Draws a picture and writes it.

    Args:
        stats: What to draw.
        path: Its suffix is the format: .png, .svg or .pdf.

    Raises:
        ConfigError: Another suffix.
        DiskError: The disk refused.
    """
    image_format = check_picture(path)
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["svg.hashsalt"] = "statistics"
        num_sides = max(len(split.lengths) for split in stats.splits.values())
        figure = Figure(figsize=(WIDTH, ROW_HEIGHT * len(stats.splits)), dpi=DPI, layout="constrained")
        figure.suptitle(stats.path, fontsize=10, parse_math=False)
        grid = figure.subplots(len(stats.splits), num_sides + 1, squeeze=False)
        for row, (name, split) in zip(grid, stats.splits.items(), strict=True):
            for axes, (side, lengths) in zip(row, split.lengths.items(), strict=False):
                _draw_lengths(axes, f"{name}: length of {sides_of(split)[side]}", lengths)
            _draw_packing(row[-1], f"{name}: how full rows are", split)
        content = io.BytesIO()
        figure.savefig(content, format=image_format, metadata={"Date": None} if image_format == "svg" else {})
    make_dir(path.parent)
    write_file(path, content.getvalue())


def _draw_lengths(axes: "Axes", title: str, lengths: Lengths) -> None:
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
