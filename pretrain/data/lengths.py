"""How long documents are: a histogram of fixed, fine bins that parts fill and a merge adds up.

Lengths below 64 have a bin each; from there on each doubling has 32 bins, so that a percentile is exact up to 63 and
at most a 32nd too low beyond. A few hundred bins hold any corpus.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

EXACT = 64
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

    def add(self, length: int) -> None:
        """Enters a document."""
        self.shortest = min(self.shortest, length) if self.bins else length
        self.longest = max(self.longest, length)
        self.bins[bin_of(length)] += 1
        self.total += length

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


def bin_of(length: int) -> int:
    """Returns the smallest length of the bin that a length falls in."""
    if length < EXACT:
        return length
    step = 1 << (length.bit_length() - BINS_PER_DOUBLING.bit_length())
    return length // step * step


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
