"""Splits: the rule that assigns documents, the writer of a part's shards in one split, and histograms of lengths.

    hash:0.01   a document is held out when the hash of its bytes falls below the fraction; duplicates stay together
    tail:0.1    the last tenth of every document's characters is held out, for a corpus of one long file

The split is a pure function of each document, not of its place in the corpus.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path

import numpy as np

from pretrain.errors import ConfigError
from pretrain.rows import IGNORE_INDEX
from pretrain.shards.index import ShardIndex
from pretrain.shards.sidecars import TokenDocuments
from pretrain.shards.writer import ShardWriter
from pretrain.utils.io import make_dir

BINS_PER_DOUBLING = 32
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)


@dataclass(slots=True)
class LengthHistogram:
    """Lengths of documents in tokens, in fixed bins that parts fill and a merge adds up.

    Lengths below 64 have a bin each; from there on each doubling has 32 bins: a percentile is exact up to 63, and at
    most a 32nd too low beyond.

    Attributes:
        bins: Documents by the smallest length of their bin.
        total: Sum of all lengths.
        shortest: Smallest length; 0 without documents.
        longest: Largest length; 0 without documents.
    """

    bins: Counter[int] = field(default_factory=Counter)
    total: int = 0
    shortest: int = 0
    longest: int = 0

    def add(self, lengths: np.ndarray) -> None:
        """Adds documents of these lengths."""
        if not len(lengths):
            return
        shortest = int(lengths.min())
        self.shortest = min(self.shortest, shortest) if self.bins else shortest
        self.longest = max(self.longest, int(lengths.max()))
        starts, counts = np.unique(bins_of(lengths), return_counts=True)
        self.bins.update(dict(zip(starts.tolist(), counts.tolist(), strict=True)))
        self.total += int(lengths.sum())

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return self.bins.total()

    def percentile(self, percent: int) -> int:
        """Returns the length that `percent` of the documents do not exceed, rounded down to its bin."""
        rank = max(1, -(-self.num_documents * percent // 100))
        for start in sorted(self.bins):
            rank -= self.bins[start]
            if rank <= 0:
                return start
        return 0

    def facts(self) -> dict[str, object]:
        """Returns its entry in statistics.json."""
        mean = round(self.total / self.num_documents, 2) if self.bins else 0
        return {
            "shortest": self.shortest,
            "mean": mean,
            "longest": self.longest,
            "percentiles": {str(percent): self.percentile(percent) for percent in PERCENTILES},
            "histogram": [[start, self.bins[start]] for start in sorted(self.bins)],
        }

    def as_json(self) -> dict[str, object]:
        """Returns the input of `lengths_from_json`."""
        bins = {str(start): self.bins[start] for start in sorted(self.bins)}
        return {"bins": bins, "total": self.total, "shortest": self.shortest, "longest": self.longest}


def lengths_from_json(raw: Mapping[str, object]) -> LengthHistogram:
    """Reads the output of `as_json`. Raises: KeyError, TypeError, ValueError."""
    bins = raw["bins"]
    if not isinstance(bins, dict):
        raise TypeError("bins are no object")
    numbers = (int(str(raw[name])) for name in ("total", "shortest", "longest"))
    return LengthHistogram(Counter({int(start): int(count) for start, count in bins.items()}), *numbers)


def bins_of(lengths: np.ndarray) -> np.ndarray:
    """Returns the smallest length of the bin of each length, int64."""
    num_bits = np.frexp(lengths)[1].astype(np.int64)  # exact: a length is far below 2**53
    shifts = np.maximum(num_bits - BINS_PER_DOUBLING.bit_length(), 0)
    return lengths >> shifts << shifts


def add_up(parts: Iterable[LengthHistogram]) -> LengthHistogram:
    """Returns the sum of histograms."""
    total = LengthHistogram()
    for part in parts:
        if part.bins:
            total.shortest = min(total.shortest, part.shortest) if total.bins else part.shortest
            total.longest = max(total.longest, part.longest)
            total.bins.update(part.bins)
            total.total += part.total
    return total


TRAIN = "train"
VALIDATION = "validation"
SPLITS = (TRAIN, VALIDATION)


@dataclass(frozen=True, slots=True)
class SplitRule:
    """A split.

    Attributes:
        kind: `hash` or `tail`.
        fraction: Held-out share, exact: floor(n x (1 - F)) must not depend on binary rounding.
        salt: Salt of the hash, 8 bytes.
        threshold: Hashes below it are held out; 8 bytes, big-endian.
    """

    kind: str
    fraction: Fraction
    salt: bytes
    threshold: bytes

    def divide(self, text: str, utf8: bytes) -> list[tuple[str, str]]:
        """Returns the non-empty (split, text) sides of a document whose text in UTF-8 is `utf8`."""
        if self.kind == "tail":
            cut = int(len(text) * (1 - self.fraction))
            return [(split, side) for split, side in ((TRAIN, text[:cut]), (VALIDATION, text[cut:])) if side]
        return [(self.split_of(utf8), text)] if text else []

    def split_of(self, key: bytes) -> str:
        """Returns the split of a document under `hash`, by its `document_key`."""
        return VALIDATION if blake2b(key, digest_size=8, salt=self.salt).digest() < self.threshold else TRAIN


def parse_split(text: str, seed: int) -> SplitRule:
    """Reads `hash:F` or `tail:F` with 0 <= F < 1.

    Raises:
        ConfigError: Anything else, or a seed outside 0..2**64-1.
    """
    kind, _, number = text.partition(":")
    try:
        fraction = Fraction(number)
    except (ValueError, ZeroDivisionError):
        fraction = Fraction(-1)
    if kind not in ("hash", "tail") or not 0 <= fraction < 1:
        raise ConfigError(
            f"split={text!r} is not a split", fix="use hash:F or tail:F with 0 <= F < 1, such as hash:0.01"
        )
    if not 0 <= seed < 2**64:
        raise ConfigError(f"seed={seed} is not a seed", fix="use a number from 0 to 2**64 - 1")
    return SplitRule(kind, fraction, seed.to_bytes(8, "big"), int(fraction * 2**64).to_bytes(8, "big"))


class SplitWriter:
    """Writes SPLIT/STEM-0000.tar, -0001.tar, ... Memory: one member."""

    def __init__(self, folder: Path, stem: str, dtype: str, kind: str, shard_tokens: int) -> None:
        """Starts without a shard; a shard is closed at the first document end at or past `shard_tokens`.

        Counts of all documents are in `lengths`, `source_lengths`, `num_learned` and `labels`. Every method may raise a
        DiskError.
        """
        self._folder, self._stem, self._dtype, self._kind = folder, stem, dtype, kind
        self._shard_tokens = shard_tokens
        self._shards: list[ShardIndex] = []
        self._open: ShardWriter | None = None
        self.lengths, self.source_lengths, self.num_learned = LengthHistogram(), LengthHistogram(), 0
        self.labels = Counter[int]()

    def add(self, documents: TokenDocuments) -> int:
        """Appends documents; returns how many were dropped for having no tokens, of pairs on one of the sides.

        A tokenizer may drop white space, and documents need not end with a token.
        """
        has_tokens = documents.tokens.lengths > 0
        if documents.source is not None:
            has_tokens &= documents.source.lengths > 0
        num_empty = int(np.count_nonzero(~has_tokens))
        if num_empty:
            documents = documents.select(has_tokens)
        self._count(documents)
        while documents.num_documents:
            if self._open is None:
                make_dir(self._folder)
                path = self._folder / f"{self._stem}-{len(self._shards):04d}.tar"
                self._open = ShardWriter(path, self._dtype, kind=self._kind)
            num_fitting = documents.tokens.count_up_to(self._shard_tokens - self._open.num_tokens)
            self._open.add(documents.slice(0, num_fitting))
            documents = documents.slice(num_fitting, documents.num_documents)
            if self._open.num_tokens >= self._shard_tokens:
                self._close_shard()
        return num_empty

    def _count(self, documents: TokenDocuments) -> None:
        self.lengths.add(documents.tokens.lengths)
        if documents.source is not None:
            self.source_lengths.add(documents.source.lengths)
        if documents.loss is not None:
            self.num_learned += int(np.count_nonzero(documents.loss))
        if documents.labels is not None:
            self.labels.update(documents.labels[documents.labels != IGNORE_INDEX].tolist())

    def close(self) -> list[ShardIndex]:
        """Commits the last shard; returns all of them."""
        self._close_shard()
        return self._shards

    def discard(self) -> None:
        """Discards an open shard."""
        if self._open is not None:
            self._open.discard()

    def _close_shard(self) -> None:
        if self._open is not None:
            self._shards.append(self._open.close())
            self._open = None
