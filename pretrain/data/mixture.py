"""The order of a mixture: the source of each sample of a run, exact at every point, in whole numbers.

    shares(t)     sum of a source's share of each of the first t samples: straight lines, bent at milestones
    a sample      the k-th of a source may come as soon as shares > k - 1, and is due where shares reach k
    deal          of the samples that may come, the one that is due first; of equals, that of the first source

So every source is within one sample of its shares at every point. Such a sequence exists for any shares (Tijdeman
1980): the samples that may only come in places i to j are never more than these places, and so (Hall) all find one, if
the most urgent goes first. That looks ahead: due places behind a milestone follow the weights there.

    period        whole numbers q_k that sum to P: source k gets q_k of every P samples
    stretches     the order repeats after P samples; samples before that, and up to P samples before a milestone, which
                  look beyond it, are in a table
    position i    its stretch, and the place in that: its source, and how often that source came before

The n-th sample of a source is arithmetic: there is no state to save. A source that does not repeat ends at the last
position up to which its shares are at most its samples; a milestone there gives its weight to the others. Not here:
the samples of a source (`stream.py`).
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor, inf, lcm
from typing import NamedTuple

import numpy as np

from pretrain.errors import ConfigError

NEVER = inf


def rates_of(weights: Sequence[float]) -> list[Fraction]:
    """Returns the share of each source in one sample, by weights as decimals; all 0 where no source has a weight."""
    parts = [Fraction(str(weight)) for weight in weights]
    total = sum(parts) or Fraction(1)
    return [part / total for part in parts]


class MixtureShares:
    """The shares of all sources, by position.

    Args:
        starts: First position of each stretch of weights, ascending from 0.
        rates: Share of each source in one sample, for each stretch; they sum to 1.
    """

    def __init__(self, starts: Sequence[int], rates: Sequence[Sequence[Fraction]]) -> None:
        self._starts, self._rates = list(starts), [list(row) for row in rates]
        self._totals = [[Fraction(0)] * len(rates[0])]
        for row, start, stop in zip(self._rates, self._starts, self._starts[1:], strict=False):
            total = [before + rate * (stop - start) for before, rate in zip(self._totals[-1], row, strict=True)]
            self._totals.append(total)
        # Whole numbers from here on: each place is a multiple of 1 / scale.
        self._scale = lcm(*(rate.numerator for row in self._rates for rate in row if rate)) * lcm(
            *(total.denominator for row in self._totals for total in row)
        )
        self._lines = [self._lines_of(source) for source in range(self.num_sources)]

    def _lines_of(self, source: int) -> list[tuple[int, int, float, float]]:
        """Returns (base, step, last due, last opening) of each stretch in which the source has a weight.

        Its shares reach k at `base + k * step`, for k up to `last due`, and exceed k there up to `last opening`.
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
        """Number of sources."""
        return len(self._rates[0])

    def at(self, position: int) -> list[Fraction]:
        """Returns the shares of all sources in the first `position` samples."""
        number = bisect_right(self._starts, position) - 1
        past = position - self._starts[number]
        return [total + rate * past for total, rate in zip(self._totals[number], self._rates[number], strict=True)]

    def due(self, source: int, count: int) -> float:
        """Returns the place where the shares of a source reach `count`, in units of 1 / scale; or NEVER."""
        for base, step, last, _ in self._lines[source]:
            if count <= last:
                return base + count * step
        return NEVER

    def opening(self, source: int, count: int) -> float:
        """Returns the number of samples after which the shares first exceed `count`; or NEVER."""
        for base, step, _, last in self._lines[source]:
            if count <= last:
                return (base + count * step) // self._scale + 1
        return NEVER


def deal(shares: MixtureShares, given: Sequence[int], start: int, stop: int) -> np.ndarray:
    """Returns the source of each sample from `start` up to `stop`, int64 [stop - start].

    Args:
        shares: Shares of all sources.
        given: Samples of each source before `start`, by `deal`.
        start: First position.
        stop: Position after the last.
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


MAX_PERIOD = 1_000_000


def period_counts(weights: Sequence[float]) -> list[int]:
    """Returns the samples of each source in one period; weights are decimals and need not sum to one.

    Raises:
        ConfigError: The period is beyond `MAX_PERIOD`.
    """
    shares = rates_of(weights)
    period = lcm(*(share.denominator for share in shares))
    if period > MAX_PERIOD:
        raise ConfigError(
            f"the weights {list(weights)} repeat only after {period} samples, at most {MAX_PERIOD}",
            fix="write them with fewer digits",
        )
    return [int(share * period) for share in shares]


class MixtureOrder:
    """Maps positions of the run to (source, position in the source).

    Cost: a table of some `P x (sources + 1)` integers a segment; a look-up is O(1) a position.
    """

    def __init__(self, segments: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Fixes the order.

        Args:
            segments: (first position, weights) of each piece of the run, the first at 0, ascending. A source of weight
                0 has at most one sample, which is still due.

        Raises:
            ConfigError: Weights that repeat too late.
        """
        assert segments and segments[0][0] == 0 and all(a[0] < b[0] for a, b in pairwise(segments))
        starts = [start for start, _ in segments]
        counts = [period_counts(weights) for _, weights in segments]
        self._shares = MixtureShares(starts, [rates_of(weights) for _, weights in segments])
        self._starts: list[int] = []
        self._stretches: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for start, stop, row in zip(starts, [*starts[1:], None], counts, strict=True):
            self._add_segment(start, stop, sum(row))

    def _add_segment(self, start: int, stop: int | None, period: int) -> None:
        """Adds the stretches of a segment: periods up to the first that begins as an earlier one did, then the rest."""
        position, begun = start, dict[tuple[int, ...], int]()
        while stop is None or stop - position >= 2 * period:
            ahead = self._ahead(position)
            if ahead in begun:
                position = self._repeat_from(begun[ahead], position, None if stop is None else stop - period)
                break
            begun[ahead] = len(self._starts)
            self._add_stretch(position, position + period)
            position += period
        if stop is not None and position < stop:
            self._add_stretch(position, stop)

    def _ahead(self, position: int) -> tuple[int, ...]:
        """Returns the state that the order from here on depends on: 1 for a source that has had its next sample."""
        had = self._had(position)
        return tuple(count - floor(share) for count, share in zip(had, self._shares.at(position), strict=True))

    def _had(self, position: int) -> list[int]:
        return self.counts(position).tolist() if self._starts else [0] * self._shares.num_sources

    def _add_stretch(self, start: int, stop: int) -> None:
        had = self._had(start)
        self._put(start, np.array(had), deal(self._shares, had, start, stop))

    def _repeat_from(self, number: int, position: int, stop: int | None) -> int:
        """Merges the stretches from `number` on, up to `position`; returns its end, at most `stop`."""
        start, before = self._starts[number], self._stretches[number][0]
        order = np.concatenate([stretch[1] for stretch in self._stretches[number:]])
        del self._starts[number:], self._stretches[number:]
        self._put(start, before, order)
        return position if stop is None else position + (stop - position) // len(order) * len(order)

    def _put(self, start: int, before: np.ndarray, order: np.ndarray) -> None:
        picked = np.zeros((len(order) + 1, self._shares.num_sources), dtype=np.int64)
        picked[np.arange(1, len(order) + 1), order] = 1
        self._starts.append(start)
        self._stretches.append((before, order, picked.cumsum(axis=0)))

    def counts(self, position: int) -> np.ndarray:
        """Returns the samples of each source among the first `position` samples of the run, int64 [sources]."""
        number = bisect_right(self._starts, position) - 1
        return self._counts_in(number, position - self._starts[number])

    def _counts_in(self, number: int, place: int) -> np.ndarray:
        before, order, counts = self._stretches[number]
        periods, rest = divmod(place, len(order))
        return before + periods * counts[-1] + counts[rest]

    def pick(self, positions: range) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each of some ascending positions, and its position in that source, int64 both."""
        sources = np.empty(len(positions), dtype=np.int64)
        places = np.empty(len(positions), dtype=np.int64)
        values = np.asarray(positions, dtype=np.int64)
        numbers = np.searchsorted(self._starts, values, side="right") - 1
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            before, order, counts = self._stretches[number]
            periods, rest = np.divmod(values[mine] - self._starts[number], len(order))
            chosen = order[rest]
            sources[mine] = chosen
            places[mine] = before[chosen] + periods * counts[-1][chosen] + counts[rest, chosen]
        return sources, places


Segment = tuple[int, list[float]]
"""First position, and weight of each source from there on."""


class FiniteMixture(NamedTuple):
    """A mixture whose sources end.

    Attributes:
        segments: Weights of each stretch, 0 for sources that have ended.
        ends: End position of each source that ends, by its number.
        end: First position without any source; None: there always is one.
    """

    segments: list[Segment]
    ends: dict[int, int]
    end: int | None


def end_sources(segments: Sequence[tuple[int, Sequence[float]]], supplies: Mapping[int, int]) -> FiniteMixture:
    """Sets the weights of sources to 0 from their ends on.

    Args:
        segments: (first position, weights) of each stretch, the first at 0, ascending.
        supplies: Samples of each source that does not repeat, by its number.
    """
    found: list[Segment] = [(start, list(weights)) for start, weights in segments]
    ends: dict[int, int] = {}
    while True:
        shares = MixtureShares([start for start, _ in found], [rates_of(weights) for _, weights in found])
        over = {source: shares.opening(source, supplies[source]) for source in supplies.keys() - ends.keys()}
        known = {source: int(place) - 1 for source, place in over.items() if place != NEVER}
        if not known:
            break
        source = min(known, key=lambda one: (known[one], one))
        ends[source] = known[source]
        found = _rest(found, source, known[source])
        # No position behind a gap without sources is ever read.
        found = found[: next((n + 1 for n, (_, weights) in enumerate(found) if not any(weights)), len(found))]
    *rest, (last, weights) = found
    return FiniteMixture(found, ends, None) if any(weights) else FiniteMixture(rest, ends, last)


def _rest(segments: Sequence[Segment], source: int, position: int) -> list[Segment]:
    """Returns the segments with weight 0 of a source from `position` on."""
    starts = sorted({position, *(start for start, _ in segments)})
    found: list[Segment] = []
    for start in starts:
        weights = list(next(row for first, row in reversed(segments) if first <= start))
        if start >= position:
            weights[source] = 0.0
        found.append((start, weights))
    assert all(a[0] < b[0] for a, b in pairwise(found))
    return found
