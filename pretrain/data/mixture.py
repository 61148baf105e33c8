"""Which source each sample of a run comes from: a pure function of the weights, exact at every point.

    weights        -> whole numbers q_k that sum to P: source k gets q_k of every P samples
    deal           -> after any i samples, source k has had its shares of these to within one (mixture_due.py)
    stretches      -> the order repeats after P samples; what stands before, and up to P samples before a milestone,
                      which look beyond it, are written out
    position i     -> its stretch, and the place in that: its source, and how often that source came before

So the n-th sample of a source is arithmetic, whatever came before: there is nothing to save. Deliberately not here:
what a source's samples are (stream.py), and its epochs: those follow from the count.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import floor, lcm

import numpy as np

from pretrain.data.mixture_due import Shares, deal, rates_of
from pretrain.errors import ConfigError

MAX_PERIOD = 1_000_000


def period_counts(weights: Sequence[float]) -> list[int]:
    """Returns how many samples of each source make one period.

    Args:
        weights: Taken as the decimals that they are written as: 0.1 is a tenth. One is above 0. Need not sum to one.

    Raises:
        ConfigError: They need a period beyond `MAX_PERIOD`.
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
            segments: (first position, weights) of each piece of the run, the first at 0, ascending. A weight may be 0:
                the source rests, but for one sample that it may still be due.

        Raises:
            ConfigError: Weights that repeat too late.
        """
        assert segments and segments[0][0] == 0 and all(a[0] < b[0] for a, b in pairwise(segments))
        starts = [start for start, _ in segments]
        counts = [period_counts(weights) for _, weights in segments]
        self._shares = Shares(starts, [rates_of(weights) for _, weights in segments])
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
        """Returns what the order from here on depends on: whether each source has had its next sample."""
        had = self._had(position)
        return tuple(count - floor(share) for count, share in zip(had, self._shares.at(position), strict=True))

    def _had(self, position: int) -> list[int]:
        return self.counts(position).tolist() if self._starts else [0] * self._shares.num_sources

    def _add_stretch(self, start: int, stop: int) -> None:
        had = self._had(start)
        self._put(start, np.array(had), deal(self._shares, had, start, stop))

    def _repeat_from(self, number: int, position: int, stop: int | None) -> int:
        """Makes one stretch of those from `number` on, up to `position`; returns where it ends, at most `stop`."""
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
        """Returns how many samples of each source the first `position` samples of the run hold, int64 [sources]."""
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
