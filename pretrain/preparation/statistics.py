"""Statistics of a `prepare`, or of a conversion: statistics.json, data_card.md and lengths.png.

They are a pure function of the inputs: no time, no machine, no path.
"""

import io
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pretrain.errors import DataError
from pretrain.kinds.layouts import LAYOUTS
from pretrain.preparation.part_record import LengthHistogram, PartRecord, count_left_out, merge_bad
from pretrain.preparation.text_pieces import MAX_LOST
from pretrain.shards.index import DataIndex
from pretrain.tokenizer.roles import unknown_id
from pretrain.utils.io import write_file, write_json
from pretrain.utils.safe_read import read_json

STATISTICS_NAME = "statistics.json"
CARD_NAME = "data_card.md"
PICTURE_NAME = "lengths.png"

_log = logging.getLogger(__name__)


def write_statistics(
    folder: Path,
    formats: Sequence[str],
    num_bytes: int,
    index: DataIndex,
    tokenizer: Tokenizer,
    records: Sequence[PartRecord],
) -> None:
    """Writes the three files; `formats` and `num_bytes` are the input's. Raises: DiskError."""
    special = tokenizer.get_added_tokens_decoder()
    splits = {name: _describe_split(name, index, records) for name in sorted(index.splits)}
    counts = Counter(formats)
    bad = merge_bad(records)
    statistics = {
        "kind": index.kind,
        "input": {
            "num_files": len(formats),
            "num_bytes": num_bytes,
            "formats": {name: counts[name] for name in sorted(counts)},
        },
        "left_out": count_left_out(records),
        "left_out_bytes": _add_bytes(records),
        "skipped": {"num_read": bad.num_read, "num_bad": bad.num_bad, "lost_bytes": bad.lost_bytes},
        "lines_dropped": {
            "documents": sum(record.num_edited for record in records),
            "bytes": sum(record.edited_bytes for record in records),
        },
        "tokenizer": {
            "model": type(tokenizer.model).__name__,
            "vocab_size": index.vocab_size,
            "dtype": index.dtype,
            "eos_id": index.eos_id,
            "sha256": index.tokenizer_sha256,
            "special_tokens": {special[number].content: number for number in sorted(special)},
        },
        "splits": splits,
    }
    if all("num_unknown_tokens" in split for split in splits.values()):
        unknown = _describe_unknown(tokenizer, splits, records)
        statistics["unknown"] = unknown
        if unknown["num_tokens"]:
            _log.warning("text is lost: %s; to keep it, use a tokenizer that knows it", _say_unknown(unknown))
    if index.layout.loss_mask:
        statistics["unused_keys"] = unused = _add_unused(records)
        if unused:
            listed = "; ".join(f"{key}: {count:,} times, not used" for key, count in unused.items())
            _log.warning("keys of records: %s", listed)
    write_json(folder / STATISTICS_NAME, statistics)
    write_file(folder / PICTURE_NAME, draw_lengths(statistics))
    write_file(folder / CARD_NAME, _render_card(statistics).encode())


def _add_bytes(records: Iterable[PartRecord]) -> dict[str, int]:
    """Returns {reason: bytes of the text of dropped documents}, of reasons with some."""
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.filtered_bytes)
    return dict(sorted(total.items()))


def _add_unused(records: Iterable[PartRecord]) -> dict[str, int]:
    """Returns {key: occurrences} of keys of records that nothing used, the most frequent first."""
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.unused)
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


def learned_share(folder: Path, split: str) -> float | None:
    """Returns the share of a split's tokens that have a loss; None: unknown, or not of records.

    Raises: DataError: It is 0.
    """
    try:
        facts = read_json(folder / STATISTICS_NAME)["splits"][split]
        share = float(facts["num_learned_tokens"] / facts["num_tokens"])
    except (OSError, ValueError, LookupError, TypeError):  # of an older version, or none
        return None
    if not share:
        raise DataError(
            f"no token of the split {split} is learned",
            where=str(folder),
            fix="give answers that are learned, or correct the template's {% generation %}",
        )
    return share


def _describe_split(name: str, index: DataIndex, records: Sequence[PartRecord]) -> dict[str, Any]:
    split = index.splits[name]
    written = [record.splits[name] for record in records]
    facts: dict[str, Any] = {
        "num_documents": split.num_documents,
        "num_tokens": split.num_tokens,
        "num_bytes_text": split.num_bytes_text,
        "bytes_per_token": round(split.num_bytes_text / split.num_tokens, 4),
        "num_shards": len(split.shards),
        "lengths": _add_up(part.lengths for part in written).facts(),
    }
    if index.layout.has_source:
        source = _add_up(part.source_lengths for part in written)
        facts["num_source_tokens"] = source.total
        facts["source_lengths"] = source.facts()
    if all(part.num_unknown is not None for part in written):
        facts["num_unknown_tokens"] = sum(part.num_unknown or 0 for part in written)
    if index.layout.loss_mask:
        facts["num_learned_tokens"] = sum(part.num_learned for part in written)
    if index.labels:
        counts = Counter[int]()
        for part in written:
            counts.update(part.num_labelled)
        facts["labels"] = {name: counts[number] for number, name in enumerate(index.labels)}
    return facts


def _describe_unknown(
    tokenizer: Tokenizer, splits: dict[str, dict[str, Any]], records: Iterable[PartRecord]
) -> dict[str, Any]:
    """Returns the count of the unknown token in all splits, and the first texts it stands for."""
    number = unknown_id(tokenizer)
    assert number is not None, "it was counted"
    num_tokens = sum(split["num_tokens"] + split.get("num_source_tokens", 0) for split in splits.values())
    num_unknown = sum(split["num_unknown_tokens"] for split in splits.values())
    lost = dict.fromkeys(text for record in records for text in record.lost)
    return {
        "token": tokenizer.id_to_token(number),
        "num_tokens": num_unknown,
        "share": round(num_unknown / num_tokens, 8),
        "of": list(lost)[:MAX_LOST],
    }


def _say_unknown(unknown: dict[str, Any]) -> str:
    lost = ", ".join(map(repr, unknown["of"]))
    share = f"{100 * unknown['share']:.3g}% of the tokens are {unknown['token']}"
    return f"{share}, of: {lost}" if lost else share


def _add_up(parts: Iterable[LengthHistogram]) -> LengthHistogram:
    total = LengthHistogram()
    for part in parts:
        total.merge(part)
    return total


def draw_lengths(statistics: dict[str, Any]) -> bytes:
    """Returns a PNG of documents by length, a line a split; the same bytes for the same facts."""
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
    axes.set_xlabel("tokens in a document" + (" (target)" if LAYOUTS[statistics["kind"]].has_source else ""))
    axes.set_ylabel("documents")
    axes.legend()
    buffer = io.BytesIO()
    # Without the version of matplotlib.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _octaves(histogram: Sequence[Sequence[int]]) -> tuple[list[float], list[int]]:
    """Returns edges and counts of bins that are a quarter of a doubling wide."""
    counts: Counter[int] = Counter()
    for start, count in histogram:
        doubling = max(start, 1).bit_length() - 1
        counts[4 * doubling + (4 * max(start, 1) // 2**doubling - 4)] += count
    first = min(counts)
    last = max(counts)
    edges = [2 ** (number // 4) * (1 + (number % 4) / 4) for number in range(first, last + 2)]
    return edges, [counts[number] for number in range(first, last + 1)]


def _render_card(statistics: dict[str, Any]) -> str:
    """Returns data_card.md."""
    inputs = statistics["input"]
    tokenizer = statistics["tokenizer"]
    splits = statistics["splits"]
    formats = ", ".join(f"{count} {name}" for name, count in inputs["formats"].items())
    source = f"{inputs['num_files']:,} files ({formats}), {inputs['num_bytes']:,} bytes"
    rows = []
    extra = []
    for name, split in splits.items():
        percentiles = split["lengths"]["percentiles"]
        counts = [split["num_documents"], split["num_tokens"], split["num_bytes_text"]]
        lengths = [percentiles["50"], percentiles["99"], split["lengths"]["longest"]]
        cells = [f"{count:,}" for count in counts] + [f"{split['bytes_per_token']:.2f}"]
        rows.append(f"| {' | '.join([name, *cells, *(f'{length:,}' for length in lengths)])} |")
        if "num_source_tokens" in split:
            extra.append(f"{name}: {split['num_source_tokens']:,} tokens of sources")
        if "num_learned_tokens" in split:
            share = f"{split['num_learned_tokens'] / split['num_tokens']:.1%}"
            extra.append(f"{name}: {split['num_learned_tokens']:,} learned tokens, {share}")
    left_out = statistics["left_out"].items()
    left_bytes = statistics["left_out_bytes"]
    dropped = statistics["lines_dropped"]
    special = ", ".join(f"`{content}`" for content in list(tokenizer["special_tokens"])[:20])
    entries = f"{tokenizer['vocab_size']:,} entries ({tokenizer['dtype']})"
    lines = [
        "# Data card",
        "",
        f"Kind: {statistics['kind']}. Input: {source}.",
        "",
        "| split | documents | tokens | bytes of text | bytes per token | median length | 99% | longest |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        *([""] if extra else []),
        *extra,
        *_label_table(splits),
        "",
        "Lengths are in tokens, the end of the document included; percentiles are rounded down by up to a 32nd.",
        "",
        "![Documents by length](lengths.png)",
        "",
        *_unknown_table(statistics),
        *_unused_table(statistics),
        "| left out | documents | bytes of text |",
        "|---|---|---|",
        *(f"| {name.replace('_', ' ')} | {count:,} | {left_bytes.get(name, 0):,} |" for name, count in left_out),
        f"| lines of documents that stay | {dropped['documents']:,} | {dropped['bytes']:,} |",
        "",
        f"Tokenizer: {tokenizer['model']}, {entries}, "
        f"special tokens {special or 'none'}, sha256 {tokenizer['sha256']}.",
        "",
    ]
    return "\n".join(lines)


def _unknown_table(statistics: dict[str, Any]) -> list[str]:
    """Returns a table of unknown tokens by split, and the first texts lost; empty if they were not counted."""
    if (unknown := statistics.get("unknown")) is None:
        return []
    rows = [f"| {name} | {split['num_unknown_tokens']:,} |" for name, split in statistics["splits"].items()]
    said = [f"Text is lost: {_say_unknown(unknown)}.", ""] if unknown["num_tokens"] else []
    return [f"| split | unknown tokens, `{unknown['token']}` |", "|---|---|", *rows, "", *said]


def _unused_table(statistics: dict[str, Any]) -> list[str]:
    rows = [f"| `{key}` | {count:,} |" for key, count in statistics.get("unused_keys", {}).items()]
    return ["| key of records that is not used | times |", "|---|---|", *rows, ""] if rows else []


def _label_table(splits: dict[str, Any]) -> list[str]:
    counted = {name: split["labels"] for name, split in splits.items() if split.get("labels")}
    if not counted:
        return []
    table = ["", f"| label | {' | '.join(counted)} |", "|---" * (1 + len(counted)) + "|"]
    for label in next(iter(counted.values())):
        cells = " | ".join(f"{counts[label]:,}" for counts in counted.values())
        table.append(f"| {label.replace('|', '&#124;')} | {cells} |")
    return table
