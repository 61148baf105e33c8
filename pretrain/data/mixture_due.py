"""What each source of a mixture is due at every point of a run, and who comes next: exact, in whole numbers.

    shares(t)     the sum of a source's share of each of the first t samples: straight lines, bent at milestones
    a sample      the k-th of a source may come as soon as shares > k - 1, and is due where shares reach k
    deal          of the samples that may come, the one that is due first; of equals, that of the first source

Then every source has had more than its shares less one, and fewer than its shares plus one, at every point. There is
such a sequence whatever the shares (Tijdeman 1980): the samples that may only come in places i to j are never more than
these places, and so (Hall) all find one, for which it is enough to take the most urgent first. That looks ahead: what
is due behind a milestone goes by the weights that hold there.
"""

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor, inf, lcm

import numpy as np

NEVER = inf


def rates_of(weights: Sequence[float]) -> list[Fraction]:
    """Returns the share of one sample that each source has, by weights: the decimals that they are written as.

    They sum to 1, or are all 0 where no source has a weight.
    """
    parts = [Fraction(str(weight)) for weight in weights]
    total = sum(parts) or Fraction(1)
    return [part / total for part in parts]


class Shares:
    """The shares of all sources, by the samples before.

    Args:
        starts: First position of each stretch of weights, ascending from 0.
        rates: Of each stretch, the share of one sample that each source has; they sum to 1.
    """

    def __init__(self, starts: Sequence[int], rates: Sequence[Sequence[Fraction]]) -> None:
        self._starts, self._rates = list(starts), [list(row) for row in rates]
        self._totals = [[Fraction(0)] * len(rates[0])]
        for row, start, stop in zip(self._rates, self._starts, self._starts[1:], strict=False):
            total = [before + rate * (stop - start) for before, rate in zip(self._totals[-1], row, strict=True)]
            self._totals.append(total)
        # Whole numbers from here on: places are told in units of 1 / scale, of which each is a multiple.
        self._scale = lcm(*(rate.numerator for row in self._rates for rate in row if rate)) * lcm(
            *(total.denominator for row in self._totals for total in row)
        )
        self._lines = [self._lines_of(source) for source in range(self.num_sources)]

    def _lines_of(self, source: int) -> list[tuple[int, int, float, float]]:
        """Returns (base, step, last due, last opening) of each stretch in which the source does not rest.

        Its shares reach k at `base + k * step`; there up to the k `last due`, and beyond k up to `last opening`.
        """
        lines: list[tuple[int, int, float, float]] = []
        for number, (start, rates) in enumerate(zip(self._starts, self._rates, strict=True)):
            if not rates[source]:
                continue
            step = self._scale / rates[source]
            base = start * self._scale - self._totals[number][source] * step
            assert base.denominator == step.denominator == 1, "the scale holds all numerators and denominators"
            last: tuple[float, float] = (NEVER, NEVER)
            if number + 1 < len(self._starts):
                total = self._totals[number + 1][source]
                last = floor(total), ceil(total) - 1
            lines.append((int(base), int(step), *last))
        return lines

    @property
    def num_sources(self) -> int:
        """How many."""
        return len(self._rates[0])

    def at(self, position: int) -> list[Fraction]:
        """Returns the shares of all sources in the first `position` samples."""
        number = bisect_right(self._starts, position) - 1
        past = position - self._starts[number]
        return [total + rate * past for total, rate in zip(self._totals[number], self._rates[number], strict=True)]

    def due(self, source: int, count: int) -> float:
        """Returns where the shares of a source reach `count`, in units of 1 / scale; NEVER if it rests to the end."""
        for base, step, last, _ in self._lines[source]:
            if count <= last:
                return base + count * step
        return NEVER

    def opening(self, source: int, count: int) -> float:
        """Returns how many samples there are when the shares first are more than `count`; or NEVER."""
        for base, step, _, last in self._lines[source]:
            if count <= last:
                return (base + count * step) // self._scale + 1
        return NEVER


def deal(shares: Shares, given: Sequence[int], start: int, stop: int) -> np.ndarray:
    """Returns the source of each sample from `start` up to `stop`, int64 [stop - start].

    Args:
        shares: What is due.
        given: Samples that each source has had before `start`, as `deal` has given them.
        start: First position.
        stop: The one after the last.
    """
    had, sources = list(given), range(shares.num_sources)
    due = [shares.due(source, had[source] + 1) for source in sources]
    opening = [shares.opening(source, had[source]) for source in sources]
    order = np.empty(stop - start, dtype=np.int64)
    for place in range(start + 1, stop + 1):
        source = min((one for one in sources if opening[one] <= place), key=due.__getitem__)
        order[place - start - 1] = source
        had[source] += 1
        due[source], opening[source] = shares.due(source, had[source] + 1), shares.opening(source, had[source])
    return order
