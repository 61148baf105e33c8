"""Statistics of a `prepare`, or of a conversion: statistics.json, data_card.md and lengths.png.

    records of the parts, index, tokenizer -> collect_statistics -> write_statistics

They are written before the index, and are a pure function of the same inputs: no time, no machine, no path.
"""

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pretrain.prepare.filters import EMPTY, REASONS, UNDECODABLE
from pretrain.prepare.output import CARD_NAME, PICTURE_NAME, STATISTICS_NAME
from pretrain.prepare.part import PartRecord
from pretrain.prepare.split import add_up, lengths_from_json
from pretrain.shards.index import DataIndex
from pretrain.utils.io import write_file, write_json


def count_left_out(records: Sequence[PartRecord]) -> dict[str, int]:
    """Returns {reason: dropped documents} for every reason."""
    counts = Counter[str]()
    for record in records:
        counts.update(record.num_filtered)
        counts.update({EMPTY: record.num_empty, UNDECODABLE: record.num_undecodable})
    return {reason: counts[reason] for reason in REASONS}


def collect_statistics(
    formats: Sequence[str], num_bytes: int, index: DataIndex, tokenizer: Tokenizer, records: Sequence[PartRecord]
) -> dict[str, Any]:
    """Returns the content of statistics.json.

    Args:
        formats: Format of each input file.
        num_bytes: Bytes of the input.
        index: Index of the shards.
        tokenizer: Tokenizer of the shards.
        records: Records in part order.
    """
    special = sorted((number, token.content) for number, token in tokenizer.get_added_tokens_decoder().items())
    counts = Counter(formats)
    return {
        "kind": index.kind,
        "input": {
            "num_files": len(formats),
            "num_bytes": num_bytes,
            "formats": {name: counts[name] for name in sorted(counts)},
        },
        "left_out": count_left_out(records),
        "tokenizer": {
            "model": type(tokenizer.model).__name__,
            "vocab_size": index.vocab_size,
            "dtype": index.dtype,
            "eos_id": index.eos_id,
            "sha256": index.tokenizer_sha256,
            "special_tokens": {content: number for number, content in special},
        },
        "splits": {name: _describe_split(name, index, records) for name in sorted(index.splits)},
    }


def _describe_split(name: str, index: DataIndex, records: Sequence[PartRecord]) -> dict[str, Any]:
    split, written = index.splits[name], [record.splits[name] for record in records]
    facts: dict[str, Any] = {
        "num_documents": split.num_documents,
        "num_tokens": split.num_tokens,
        "num_bytes_text": split.num_bytes_text,
        "bytes_per_token": round(split.num_bytes_text / split.num_tokens, 4),
        "num_shards": len(split.shards),
        "lengths": add_up(lengths_from_json(part.lengths) for part in written if part.lengths).facts(),
    }
    if index.kind == "pairs":
        source = add_up(lengths_from_json(part.source_lengths) for part in written if part.source_lengths)
        facts["num_source_tokens"], facts["source_lengths"] = source.total, source.facts()
    if index.kind == "records":
        facts["num_learned_tokens"] = sum(part.num_learned for part in written)
    if index.labels:
        counts = Counter[str]()
        for part in written:
            counts.update(part.num_labelled)
        facts["labels"] = {name: counts[str(number)] for number, name in enumerate(index.labels)}
    return facts


def write_statistics(folder: Path, statistics: dict[str, Any]) -> None:
    """Writes the three files. Raises: DiskError."""
    write_json(folder / STATISTICS_NAME, statistics)
    write_file(folder / PICTURE_NAME, draw_lengths(statistics))
    write_file(folder / CARD_NAME, render_card(statistics).encode())


def draw_lengths(statistics: dict[str, Any]) -> bytes:
    """Returns a PNG: documents by length, a line a split, both axes logarithmic. The same bytes for the same facts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, split in statistics["splits"].items():
        edges, counts = _octaves(split["lengths"]["histogram"])
        axes.stairs(counts, edges, fill=name == "train", alpha=0.7, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens in a document" + (" (target)" if statistics["kind"] == "pairs" else ""))
    axes.set_ylabel("documents")
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _octaves(histogram: Sequence[Sequence[int]]) -> tuple[list[float], list[int]]:
    """Returns edges and counts of bins that are a quarter of a doubling wide."""
    counts: Counter[int] = Counter()
    for start, count in histogram:
        doubling = max(start, 1).bit_length() - 1
        counts[4 * doubling + (4 * max(start, 1) // 2**doubling - 4)] += count
    bins = range(min(counts), max(counts) + 1)
    edges = [2 ** (number // 4) * (1 + (number % 4) / 4) for number in (*bins, max(counts) + 1)]
    return edges, [counts[number] for number in bins]


def render_card(statistics: dict[str, Any]) -> str:
    """Returns data_card.md."""
    given, tokenizer = statistics["input"], statistics["tokenizer"]
    size = f"{given['num_bytes']:,} bytes"
    formats = ", ".join(f"{count} {name}" for name, count in given["formats"].items())
    rows = [
        f"| {name} | {split['num_documents']:,} | {split['num_tokens']:,} | {split['num_bytes_text']:,} | "
        f"{split['bytes_per_token']:.2f} | {split['lengths']['percentiles']['50']:,} | "
        f"{split['lengths']['percentiles']['99']:,} | {split['lengths']['longest']:,} |"
        for name, split in statistics["splits"].items()
    ]
    left_out = [f"| {reason.replace('_', ' ')} | {count:,} |" for reason, count in statistics["left_out"].items()]
    special = ", ".join(f"`{content}`" for content in list(tokenizer["special_tokens"])[:20]) or "none"
    extra = [
        f"{name}: {split[key]:,} {what}"
        for name, split in statistics["splits"].items()
        for key, what in (("num_source_tokens", "tokens of sources"), ("num_learned_tokens", "learned tokens"))
        if key in split
    ]
    return "\n".join(
        [
            "# Data card",
            "",
            f"Kind: {statistics['kind']}. Input: {given['num_files']:,} files ({formats}), {size}.",
            "",
            "| split | documents | tokens | bytes of text | bytes per token | median length | 99% | longest |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            *([""] if extra else []),
            *extra,
            *_label_table(statistics["splits"]),
            "",
            "Lengths are in tokens, the end of the document included; percentiles are rounded down by up to a 32nd.",
            "",
            "![Documents by length](lengths.png)",
            "",
            "| left out | documents |",
            "|---|---|",
            *left_out,
            "",
            f"Tokenizer: {tokenizer['model']}, {tokenizer['vocab_size']:,} entries ({tokenizer['dtype']}), "
            f"special tokens {special}, sha256 {tokenizer['sha256']}.",
            "",
        ]
    )


def _label_table(splits: dict[str, Any]) -> list[str]:
    """Returns a table of labels by split; empty without labels."""
    counted = {name: split["labels"] for name, split in splits.items() if "labels" in split}
    if not counted:
        return []
    rows = [
        f"| {label.replace('|', '&#124;')} | " + " | ".join(f"{counts[label]:,}" for counts in counted.values()) + " |"
        for label in next(iter(counted.values()))
    ]
    return ["", f"| label | {' | '.join(counted)} |", "|---" * (1 + len(counted)) + "|", *rows]
