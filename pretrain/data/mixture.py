"""A mixture: the source of each sample of a run, exact at every point, and the rows of all sources.

    shares(t)     sum of a source's share of each of the first t samples: straight lines, bent at
                  milestones
    a sample      the k-th of a source may come as soon as shares > k - 1, and is due where shares
                  reach k
    deal          of the samples that may come, the one that is due first, then the first source

So every source is within one sample of its shares at every point. Such a sequence exists for any
shares (Tijdeman 1980): the samples that may only come in places i to j are never more than these
places, and so (Hall) all find one, if the most urgent goes first. That looks ahead: due places
behind a milestone follow the weights there.

    period        whole numbers q_k that sum to P: source k gets q_k of every P samples
    stretches     the order repeats after P samples; samples before that, and up to P samples before
                  a milestone, which look beyond it, are in a table
    blocks        a period that begins with whole shares is dealt in many places at once
    position i    its stretch, and the place in that: its source, and the earlier samples of that

The n-th sample of a source is arithmetic: there is no state to save. A source that does not repeat
ends at the last position up to which its shares are at most its samples; a milestone there gives
its weight to the others. Not here: the samples of a source (`stream.py`).
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor, inf, isqrt, lcm
from typing import Any, NamedTuple, Protocol

import numpy as np

from pretrain.errors import ConfigError
from pretrain.rows import Array, TokenRows, merge_rows

NEVER = inf
MAX_PERIOD = 1_000_000
# Bits of a sample id with its source, below the sign: up to 4,096 sources of 2**51 samples each.
SOURCE_BITS = 12
MAX_BLOCK_ELEMENTS = 1 << 18
"""Sources times blocks that are dealt at once: some 2 MiB an array."""

Segment = tuple[int, Sequence[float]]
"""First position, and weight of each source from there on."""


def rates_of(weights: Sequence[float]) -> list[Fraction]:
    """Returns the share of each source in one sample, by decimal weights; all 0 without weights."""
    parts = [Fraction(str(weight)) for weight in weights]
    total = sum(parts) or Fraction(1)
    return [part / total for part in parts]


class MixtureShares:
    """The shares of all sources, by position."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._starts = [start for start, _ in segments]
        self._rates = [rates_of(weights) for _, weights in segments]
        self.num_sources = len(self._rates[0])
        self._totals = [[Fraction(0)] * self.num_sources]
        for rates, (start, stop) in zip(self._rates, pairwise(self._starts), strict=False):
            before = self._totals[-1]
            self._totals.append([total + rate * (stop - start) for total, rate in zip(before, rates, strict=True)])
        # Whole numbers from here on: each place is a multiple of 1 / scale.
        self._scale = lcm(*(rate.numerator for row in self._rates for rate in row if rate)) * lcm(
            *(total.denominator for row in self._totals for total in row)
        )
        self._lines = [self._lines_of(source) for source in range(self.num_sources)]

    def _lines_of(self, source: int) -> list[tuple[int, int, float, float]]:
        """Returns (base, step, last due, last opening) of each stretch with a weight of the source.

        Its shares reach k at `base + k * step`, for k up to `last due`, and exceed k there up to
        `last opening`.
        """
        lines: list[tuple[int, int, float, float]] = []
        for number, (start, rates) in enumerate(zip(self._starts, self._rates, strict=True)):
            if not rates[source]:
                continue
            step = self._scale / rates[source]
            base = start * self._scale - self._totals[number][source] * step
            assert base.denominator == step.denominator == 1
            last: tuple[float, float] = (NEVER, NEVER)
            if number + 1 < len(self._starts):
                total = self._totals[number + 1][source]
                last = floor(total), ceil(total) - 1
            lines.append((int(base), int(step), *last))
        return lines

    def at(self, position: int) -> list[Fraction]:
        """Returns the shares of all sources in the first `position` samples."""
        number = bisect_right(self._starts, position) - 1
        past = position - self._starts[number]
        rates = self._rates[number]
        return [total + rate * past for total, rate in zip(self._totals[number], rates, strict=True)]

    def due(self, source: int, count: int) -> float:
        """Returns the place, times `_scale`, where the shares of a source reach `count`; or NEVER."""
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
    """Returns the source of each sample from `start` to `stop`, uint16, after `given` of each."""
    had = list(given)
    sources = range(shares.num_sources)
    due = [shares.due(source, had[source] + 1) for source in sources]
    opening = [shares.opening(source, had[source]) for source in sources]
    order = np.empty(stop - start, dtype=np.uint16)
    for place in range(start + 1, stop + 1):
        source = min((one for one in sources if opening[one] <= place), key=due.__getitem__)
        order[place - start - 1] = source
        had[source] += 1
        due[source] = shares.due(source, had[source] + 1)
        opening[source] = shares.opening(source, had[source])
    return order


def deal_period(counts: Sequence[int]) -> np.ndarray:
    """Returns the source of each sample of a period that begins with whole shares, as `deal` does.

    Blocks are dealt at once, each from a likely state. Where one ends in another state than the
    next began with, that one is dealt again: soon none is, as most states lead to the same one.
    """
    sources = np.flatnonzero(counts)
    rates = np.array(counts, dtype=np.int64)[sources]
    period = int(rates.sum())
    length = -(-period // max(1, min(isqrt(period), MAX_BLOCK_ELEMENTS // len(sources))))
    starts = np.arange(0, period, length)
    had = _likely_states(rates, starts)
    ends = np.empty_like(had)
    order = np.empty((len(starts), length), dtype=np.uint16)
    again = np.arange(len(starts))
    while len(again):
        state = had[again]
        order[again] = _deal_blocks(rates, starts[again], state, length)
        ends[again] = state
        again = 1 + np.flatnonzero((ends[:-1] != had[1:]).any(axis=1))
        had[again] = ends[again - 1]
    return sources.astype(np.uint16)[order.ravel()[:period]]


def _likely_states(rates: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Returns samples of each source before some places: whole shares, and one of those due first.

    int64 [starts, sources], `starts` in sum.
    """
    had, rest = np.divmod(starts[:, None] * rates, rates.sum())
    due = np.where(rest, (had + 1) / rates, inf)
    urgency = due.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    return had + (urgency < (starts - had.sum(axis=1))[:, None])


def _deal_blocks(rates: np.ndarray, starts: np.ndarray, had: np.ndarray, length: int) -> np.ndarray:
    """Deals `length` samples from each start on, and adds them to `had`.

    Returns their sources, uint16 [starts, length].
    Places at which shares reach a count are exact enough in float64: two that differ do so by more
    than 1 / MAX_PERIOD**2 of themselves.
    """
    period = rates.sum()
    due = (had + 1) * period / rates
    opening = had * period // rates
    blocks = np.arange(len(starts))
    order = np.empty((len(starts), length), dtype=np.uint16)
    for place in range(length):
        source = np.where(opening <= (starts + place)[:, None], due, inf).argmin(axis=1)
        order[:, place] = source
        had[blocks, source] += 1
        count = had[blocks, source]
        due[blocks, source] = (count + 1) * period / rates[source]
        opening[blocks, source] = count * period // rates[source]
    return order


def period_counts(weights: Sequence[float]) -> list[int]:
    """Returns the samples of each source in a period. Raises: ConfigError: It is beyond `MAX_PERIOD`."""
    shares = rates_of(weights)
    period = lcm(*(share.denominator for share in shares))
    if period > MAX_PERIOD:
        raise ConfigError(
            f"the weights {list(weights)} repeat only after {period} samples, at most {MAX_PERIOD}",
            fix="write them with fewer digits",
        )
    return [int(share * period) for share in shares]


class _Stretch(NamedTuple):
    """Samples whose order repeats."""

    before: np.ndarray  # int64 [sources], samples of each source before it
    order: np.ndarray  # uint16 [samples], the source of each
    places: np.ndarray  # int32 [samples], samples of that source before it within the stretch
    totals: np.ndarray  # int64 [sources], samples of each source in the stretch


class MixtureOrder:
    """Maps positions of the run to (source, position in the source), by ascending segments from 0.

    Cost: a table of some P sources and places, 6 bytes each, a segment; a look-up is O(1) a
    position. A source of weight 0 has at most one sample, which is still due.

    Raises:
        ConfigError: Weights that repeat too late.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        assert segments and segments[0][0] == 0 and all(a[0] < b[0] for a, b in pairwise(segments))
        starts = [start for start, _ in segments]
        counts = [period_counts(weights) for _, weights in segments]
        self._shares = MixtureShares(segments)
        self._starts: list[int] = []
        self._stretches: list[_Stretch] = []
        for start, stop, row in zip(starts, [*starts[1:], None], counts, strict=True):
            self._add_segment(start, stop, row)

    def _add_segment(self, start: int, stop: int | None, counts: Sequence[int]) -> None:
        """Adds periods up to the first that begins as an earlier one did, then the rest."""
        position = start
        period = sum(counts)
        begun: dict[tuple[int, ...], int] = {}
        while stop is None or stop - position >= 2 * period:
            ahead = self._ahead(position)
            if ahead in begun:
                # One stretch that repeats takes the place of all since that one.
                number = begun[ahead]
                first = self._starts[number]
                before = self._stretches[number].before
                order = np.concatenate([stretch.order for stretch in self._stretches[number:]])
                del self._starts[number:], self._stretches[number:]
                self._put(first, before, order)
                if stop is None:
                    return
                position += (stop - period - position) // len(order) * len(order)
                break
            begun[ahead] = len(self._starts)
            if all(share.denominator == 1 for share in self._shares.at(position)):
                self._put(position, np.array(self._had(position)), deal_period(counts))
            else:
                self._deal(position, position + period)
            position += period
        if position < stop:
            self._deal(position, stop)

    def _ahead(self, position: int) -> tuple[int, ...]:
        """Returns the state of the order: 1 for a source that has had its next sample."""
        shares = self._shares.at(position)
        return tuple(count - floor(share) for count, share in zip(self._had(position), shares, strict=True))

    def _had(self, position: int) -> list[int]:
        return self.counts(position).tolist() if self._starts else [0] * self._shares.num_sources

    def _deal(self, start: int, stop: int) -> None:
        had = self._had(start)
        self._put(start, np.array(had), deal(self._shares, had, start, stop))

    def _put(self, start: int, before: np.ndarray, order: np.ndarray) -> None:
        totals = np.bincount(order, minlength=self._shares.num_sources)
        places = np.empty(len(order), dtype=np.int32)
        firsts = totals.cumsum() - totals
        places[order.argsort(kind="stable")] = np.arange(len(order)) - firsts.repeat(totals)
        self._starts.append(start)
        self._stretches.append(_Stretch(before, order, places, totals))

    def counts(self, position: int) -> np.ndarray:
        """Returns the samples of each source before a position, int64 [sources]."""
        number = bisect_right(self._starts, position) - 1
        before, order, _, totals = self._stretches[number]
        periods, rest = divmod(position - self._starts[number], len(order))
        return before + periods * totals + np.bincount(order[:rest], minlength=len(totals))

    def pick(self, positions: range) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each position, and the position in that source, int64 both."""
        values = np.asarray(positions, dtype=np.int64)
        sources = np.empty_like(values)
        places = np.empty_like(values)
        numbers = np.searchsorted(self._starts, values, side="right") - 1
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            before, order, within, totals = self._stretches[number]
            periods, rest = np.divmod(values[mine] - self._starts[number], len(order))
            chosen = order[rest]
            sources[mine] = chosen
            places[mine] = before[chosen] + periods * totals[chosen] + within[rest]
        return sources, places


class FiniteMixture(NamedTuple):
    """A mixture whose sources end: segments with weight 0 from there on."""

    segments: Sequence[Segment]
    ends: dict[int, int]  # end position of each source that ends, by its number
    end: int | None  # first position without any source; None: there always is one


def end_sources(segments: Sequence[Segment], supplies: Mapping[int, int]) -> FiniteMixture:
    """Sets the weights of sources to 0 from their ends on, by the samples of those that do not repeat."""
    ended = list(segments)
    ends: dict[int, int] = {}
    while True:
        shares = MixtureShares(ended)
        remaining = sorted(supplies.keys() - ends.keys())
        openings = {source: shares.opening(source, supplies[source]) for source in remaining}
        source = min(remaining, key=openings.__getitem__, default=None)
        if source is None or openings[source] == NEVER:
            break
        ends[source] = int(openings[source]) - 1
        ended = _rest(ended, source, ends[source])
        # No position behind a gap without sources is ever read.
        gaps = [number for number, (_, weights) in enumerate(ended) if not any(weights)]
        ended = ended[: gaps[0] + 1] if gaps else ended
    *rest, (last, weights) = ended
    return FiniteMixture(ended, ends, None) if any(weights) else FiniteMixture(rest, ends, last)


def _rest(segments: Sequence[Segment], source: int, position: int) -> list[Segment]:
    rest: list[Segment] = []
    for start in sorted({position, *(start for start, _ in segments)}):
        weights = list(next(row for first, row in reversed(segments) if first <= start))
        if start >= position:
            weights[source] = 0.0
        rest.append((start, weights))
    return rest


class RowSource(Protocol):
    """The samples of a source, or of a run, by position."""

    def read(self, positions: range) -> TokenRows:
        """Reads the samples at some positions."""


class MixtureStream:
    """Draws from several streams of one kind, tokenizer and row length."""

    def __init__(self, sources: Sequence[RowSource], order: MixtureOrder) -> None:
        assert 1 <= len(sources) <= 1 << SOURCE_BITS
        self._sources = sources
        self.order = order

    def read(self, positions: range) -> TokenRows:
        """Reads the samples at some ascending positions of the run, one apart. Raises: DataError."""
        assert positions.step == 1
        sources, places = self.order.pick(positions)
        parts = []
        order = []
        for source in np.unique(sources).tolist():
            (rows,) = np.nonzero(sources == source)
            # Consecutive positions of the run hold consecutive samples of each source.
            part = self._sources[source].read(range(int(places[rows[0]]), int(places[rows[-1]]) + 1))
            ids_B = part.sample_ids_B + (source << (63 - SOURCE_BITS))
            parts.append(replace(part, sample_ids_B=ids_B))
            order.append(rows)
        return merge_rows(parts, np.concatenate(order))


def source_of(sample_ids: Array) -> Array:
    """Returns the source of each sample of a mixture, int64."""
    ids: Any = sample_ids
    sources: Array = ids >> (63 - SOURCE_BITS)
    return sources
