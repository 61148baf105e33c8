"""How long documents are: a histogram of fixed, fine bins that parts fill and a merge adds up.

Lengths below 64 have a bin each; from there on each doubling has 32 bins, so that a percentile is exact up to 63 and
at most a 32nd too low beyond. A few hundred bins hold any corpus.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

BINS_PER_DOUBLING = 32
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)


@dataclass(slots=True)
class Lengths:
    """Lengths of documents, in tokens.

    Attributes:
        bins: Documents by the smallest length of their bin.
        total: Sum of all lengths.
        shortest: 0 where there is no document.
        longest: Likewise.
    """

    bins: Counter[int] = field(default_factory=Counter)
    total: int = 0
    shortest: int = 0
    longest: int = 0

    def add(self, lengths: np.ndarray) -> None:
        """Enters documents, by the tokens of each."""
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
        """Documents entered."""
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
        """Returns what statistics say of it."""
        mean = round(self.total / self.num_documents, 2) if self.bins else 0
        return {
            "shortest": self.shortest,
            "mean": mean,
            "longest": self.longest,
            "percentiles": {str(percent): self.percentile(percent) for percent in PERCENTILES},
            "histogram": [[start, self.bins[start]] for start in sorted(self.bins)],
        }

    def as_json(self) -> dict[str, object]:
        """Returns what `lengths_from_json` reads."""
        bins = {str(start): self.bins[start] for start in sorted(self.bins)}
        return {"bins": bins, "total": self.total, "shortest": self.shortest, "longest": self.longest}


def lengths_from_json(raw: Mapping[str, object]) -> Lengths:
    """Reads what `as_json` gave. Raises: KeyError, TypeError, ValueError."""
    bins = raw["bins"]
    if not isinstance(bins, dict):
        raise TypeError("bins are no object")
    numbers = (int(str(raw[name])) for name in ("total", "shortest", "longest"))
    return Lengths(Counter({int(start): int(count) for start, count in bins.items()}), *numbers)


def bins_of(lengths: np.ndarray) -> np.ndarray:
    """Returns, int64, the smallest length of the bin that each length falls in."""
    num_bits = np.frexp(lengths)[1].astype(np.int64)  # exact: a length is far below 2**53
    shifts = np.maximum(num_bits - BINS_PER_DOUBLING.bit_length(), 0)
    return lengths >> shifts << shifts


def add_up(parts: Iterable[Lengths]) -> Lengths:
    """Returns the lengths of all parts."""
    total = Lengths()
    for part in parts:
        if part.bins:
            total.shortest = min(total.shortest, part.shortest) if total.bins else part.shortest
            total.longest = max(total.longest, part.longest)
            total.bins.update(part.bins)
            total.total += part.total
    return total
