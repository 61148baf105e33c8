"""The output of a part: its shards in each split, and its record, which is written last.

    PartWriter     documents -> SPLIT/part-00007-0000.tar, -0001.tar, ...  -> parts/part-00007.json
    load_records   the records of finished parts
    merge_splits   records in part order -> the splits of the index

Without its record a part is not done, and its shards are leftovers.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import TypeAdapter

from pretrain.errors import DataError
from pretrain.preparation.filters import EMPTY, NOT_JSON, REASONS, UNDECODABLE, BadItems, BadLimit
from pretrain.preparation.input_parts import InputPart
from pretrain.preparation.split import SPLITS, TRAIN
from pretrain.rows import IGNORE_INDEX
from pretrain.shards.index import ShardIndex, SplitIndex, build_split
from pretrain.shards.ragged import TokenDocuments
from pretrain.shards.writer import ShardWriter
from pretrain.utils.io import make_dir, write_json
from pretrain.utils.units import plural

PARTS_DIR = "parts"
BINS_PER_DOUBLING = 32
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class LengthHistogram:
    """Lengths of documents in tokens, in fixed bins that parts fill and a merge adds up.

    Lengths below 64 have a bin each; from there on each doubling has 32 bins: a percentile is exact
    up to 63, and at most a 32nd too low beyond.
    """

    bins: Counter[int] = field(default_factory=Counter)  # by the smallest length of each
    total: int = 0
    shortest: int = 0
    longest: int = 0

    def add(self, lengths: np.ndarray) -> None:
        """Adds documents of these lengths."""
        if not len(lengths):
            return
        starts, counts = np.unique(bins_of(lengths), return_counts=True)
        bins = Counter(dict(zip(starts.tolist(), counts.tolist(), strict=True)))
        total = int(lengths.sum())
        self.merge(LengthHistogram(bins, total, int(lengths.min()), int(lengths.max())))

    def merge(self, other: "LengthHistogram") -> None:
        """Adds the documents of another histogram."""
        if not other.bins:
            return
        self.shortest = min(self.shortest, other.shortest) if self.bins else other.shortest
        self.longest = max(self.longest, other.longest)
        self.bins.update(other.bins)
        self.total += other.total

    def percentile(self, percent: int) -> int:
        """Returns the length that `percent` of documents do not exceed, rounded down to its bin."""
        rank = max(1, -(-self.bins.total() * percent // 100))
        for start in sorted(self.bins):
            rank -= self.bins[start]
            if rank <= 0:
                return start
        return 0

    def facts(self) -> dict[str, object]:
        """Returns its entry in statistics.json."""
        return {
            "shortest": self.shortest,
            "mean": round(self.total / self.bins.total(), 2) if self.bins else 0,
            "longest": self.longest,
            "percentiles": {str(percent): self.percentile(percent) for percent in PERCENTILES},
            "histogram": [[start, self.bins[start]] for start in sorted(self.bins)],
        }


def bins_of(lengths: np.ndarray) -> np.ndarray:
    """Returns the smallest length of the bin of each length, int64."""
    num_bits = np.frexp(lengths)[1].astype(np.int64)  # exact: a length is far below 2**53
    shifts = np.maximum(num_bits - BINS_PER_DOUBLING.bit_length(), 0)
    return lengths >> shifts << shifts


@dataclass(slots=True)
class SplitRecord:
    """The output of a part in one split."""

    num_bytes_text: int = 0  # UTF-8; of pairs, of the targets
    shards: list[ShardIndex] = field(default_factory=list)  # in order
    lengths: LengthHistogram = field(default_factory=LengthHistogram)  # of pairs, of the targets
    source_lengths: LengthHistogram = field(default_factory=LengthHistogram)
    num_learned: int = 0  # tokens of records that have a loss
    num_unknown: int | None = None  # unknown tokens, of pairs on both sides; None: not counted
    num_labelled: Counter[int] = field(default_factory=Counter)  # tokens, by number of the label

    def count(self, documents: TokenDocuments, unknown: int | None) -> None:
        """Enters documents that are written; `unknown` is the id of the unknown token."""
        self.lengths.add(documents.tokens.lengths)
        if documents.source is not None:
            self.source_lengths.add(documents.source.lengths)
        if unknown is not None:
            sides = (documents.tokens, documents.source)
            num_unknown = sum(int(np.count_nonzero(side.values == unknown)) for side in sides if side is not None)
            self.num_unknown = (self.num_unknown or 0) + num_unknown
        if documents.loss is not None:
            self.num_learned += int(np.count_nonzero(documents.loss & 1))
        if documents.labels is not None:
            self.num_labelled.update(documents.labels[documents.labels != IGNORE_INDEX].tolist())


@dataclass(slots=True)
class PartRecord:
    """The output of a part."""

    tokenizer_sha256: str
    splits: dict[str, SplitRecord]
    num_empty: int = 0  # without text, or without tokens
    num_undecodable: int = 0  # files or lines that are not UTF-8
    num_filtered: dict[str, int] = field(default_factory=dict)  # by reason
    filtered_bytes: dict[str, int] = field(default_factory=dict)  # of their text, by reason
    bad: BadItems = field(default_factory=BadItems)  # of the input
    num_edited: int = 0  # documents that stay, of which a rule dropped lines
    edited_bytes: int = 0  # of these lines
    unused: dict[str, int] = field(default_factory=dict)  # keys that nothing used, counted
    lost: list[str] = field(default_factory=list)  # the first texts that became unknown tokens
    # Of image tars that others made: labels in the order of their numbers in this part, with the place
    # of the first image of each; and the address of each tar that is not in the folder.
    labels: dict[str, str] = field(default_factory=dict)
    tars: dict[str, str] = field(default_factory=dict)
    captions: dict[str, list[str]] = field(default_factory=dict)  # of images, by shard

    @property
    def num_documents(self) -> int:
        """Documents in all splits."""
        return sum(shard.num_documents for split in self.splits.values() for shard in split.shards)


_RECORD = TypeAdapter(PartRecord)


@dataclass
class PartWriter:
    """Writes the shards of a part, and its record. Memory: one member of each split.

    A shard is closed at the first document end at or past `shard_tokens`. Leaving its `with`
    discards what is not committed. `unknown` is the id of the unknown token, whose occurrences are
    counted; None: they are not. Every method may raise a DiskError.
    """

    folder: Path
    part: InputPart
    tokenizer_sha256: str
    dtype: str
    kind: str
    shard_tokens: int
    unknown: int | None = None

    def __post_init__(self) -> None:
        num_unknown = None if self.unknown is None else 0
        splits = {name: SplitRecord(num_unknown=num_unknown) for name in SPLITS}
        self.record = PartRecord(self.tokenizer_sha256, splits)
        self._open: dict[str, ShardWriter] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for shard in self._open.values():
            shard.discard()

    def add(self, split: str, documents: TokenDocuments) -> None:
        """Appends documents; one without tokens, of pairs on one of the sides, is counted only."""
        # A tokenizer may drop white space, and documents need not end with a token.
        has_tokens = documents.tokens.lengths > 0
        if documents.source is not None:
            has_tokens &= documents.source.lengths > 0
        if not has_tokens.all():
            self.record.num_empty += int(np.count_nonzero(~has_tokens))
            documents = documents.select(has_tokens)
        self.record.splits[split].count(documents, self.unknown)
        while documents.num_documents:
            shard = self._open.get(split) or self._open_shard(split)
            num_fitting = documents.tokens.count_up_to(self.shard_tokens - shard.num_tokens)
            shard.add(documents.slice(0, num_fitting))
            documents = documents.slice(num_fitting, documents.num_documents)
            if shard.num_tokens >= self.shard_tokens:
                self._close_shard(split)

    def commit(self, **facts: object) -> None:
        """Closes the shards and writes the record, with further facts of the caller."""
        for split in list(self._open):
            self._close_shard(split)
        raw: dict[str, Any] = _RECORD.dump_python(self.record, mode="json")
        for entry in raw["splits"].values():
            # Only pairs have sources.
            if not entry["source_lengths"]["bins"]:
                entry["source_lengths"] = {}
        write_json(record_path(self.folder, self.part), raw | facts)

    def _open_shard(self, split: str) -> ShardWriter:
        make_dir(self.folder / split)
        number = len(self.record.splits[split].shards)
        path = self.folder / split / f"{self.part.name}-{number:04d}.tar"
        self._open[split] = ShardWriter(path, self.dtype, kind=self.kind)
        return self._open[split]

    def _close_shard(self, split: str) -> None:
        # Still open for `__exit__` until it is closed.
        self.record.splits[split].shards.append(self._open[split].close())
        del self._open[split]


def write_record(folder: Path, part: InputPart, record: PartRecord) -> None:
    """Writes the record of a part whose shards are closed. Raises: DiskError."""
    write_json(record_path(folder, part), _RECORD.dump_python(record, mode="json"))


def record_path(folder: Path, part: InputPart) -> Path:
    """Returns the file of a part's record."""
    return folder / PARTS_DIR / f"{part.name}.json"


def load_records(folder: Path, parts: Iterable[InputPart], tokenizer_sha256: str) -> dict[int, PartRecord]:
    """Returns the records of the parts finished with this tokenizer, by number."""
    records = {part.number: _load_record(folder, part) for part in parts}
    return {
        number: record for number, record in records.items() if record and record.tokenizer_sha256 == tokenizer_sha256
    }


def _load_record(folder: Path, part: InputPart) -> PartRecord | None:
    """Returns the record of a part; None: not finished, or a file has another size."""
    try:
        record = _RECORD.validate_json(record_path(folder, part).read_bytes())
        sizes = _sizes(record).items()
        is_whole = all((folder / name).stat().st_size == size for name, size in sizes)
    except (OSError, ValueError):
        return None
    return record if is_whole else None


def _sizes(record: PartRecord) -> dict[str, int]:
    shards = [shard for split in record.splits.values() for shard in split.shards]
    sizes = {name: size for shard in shards for name, size in shard.sizes.items()}
    return {name: size for name, size in sizes.items() if name not in record.tars}


def remove_leftovers(folder: Path, parts: Sequence[InputPart], records: dict[int, PartRecord]) -> None:
    """Removes every file of `parts` that is in no record."""
    valid = {record_path(folder, part) for part in parts if part.number in records}
    for record in records.values():
        valid.update(folder / name for name in _sizes(record))
    names = {part.name for part in parts}
    for name in (PARTS_DIR, *SPLITS):
        for path in (folder / name).glob("part-*"):
            # `part-00007` of `part-00007-0000.tar`
            part_name = "-".join(path.name.split(".")[0].split("-")[:2])
            if path not in valid and part_name in names:
                path.unlink()
    make_dir(folder / PARTS_DIR)


def count_left_out(records: Iterable[PartRecord]) -> dict[str, int]:
    """Returns {reason: dropped documents} for the usual reasons, and of the rules that are on."""
    counts = Counter[str]()
    for record in records:
        counts.update(record.num_filtered)
        counts.update({EMPTY: record.num_empty, UNDECODABLE: record.num_undecodable})
    return {reason: counts[reason] for reason in dict.fromkeys((*REASONS, *counts))}


def merge_bad(records: Iterable[PartRecord], limit: BadLimit | None = None) -> BadItems:
    """Returns the bad items of all parts, in part order. Raises: TooManyBadError."""
    bad = BadItems()
    for record in records:
        bad.merge(record.bad)
    if limit is not None:
        bad.check(limit, is_whole=True)
    return bad


def merge_splits(records: Sequence[PartRecord], documents: str = "text") -> dict[str, SplitIndex]:
    """Merges records, in part order; logs the documents that were left out. Raises: DataError."""
    named = {EMPTY: "empty", UNDECODABLE: "not UTF-8", NOT_JSON: "not JSON"}
    bad = merge_bad(records)
    for reason, count in count_left_out(records).items():
        if count:
            _log.info("skipped %s: %s", plural(count, "document"), named.get(reason, reason.replace("_", " ")))
        for error in bad.first.get(reason, ()):
            _log.warning("left out: %s", error)
    splits: dict[str, SplitIndex] = {}
    for name in SPLITS:
        written = [record.splits[name] for record in records]
        shards = [shard for part in written for shard in part.shards]
        split = build_split(shards, sum(part.num_bytes_text for part in written))
        if split.num_documents:
            splits[name] = split
    if TRAIN not in splits:
        raise nothing_to_train_on(count_left_out(records), documents)
    return splits


def nothing_to_train_on(left_out: Mapping[str, int], documents: str = "text") -> DataError:
    """Returns the error of an input without training documents, with the counts by reason."""
    names = [name for name in dict.fromkeys((*REASONS, *left_out)) if left_out.get(name)]
    reasons = [f"{name.replace('_', ' ')} {left_out[name]:,}" for name in names]
    skipped = f" (documents skipped: {', '.join(reasons)})" if reasons else ""
    fix = f"give more {documents}, or hold out less with --split"
    verb = "are" if documents.endswith("s") else "is"
    return DataError(f"there {verb} no {documents} to train on", fix=fix + skipped)
