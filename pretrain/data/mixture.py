"""Which source each sample of a run comes from: a pure function of the weights, exact at every point.

    weights        -> whole numbers q_k that sum to P: source k gets q_k of every P samples
    one period     -> the sequence of Tijdeman (1980): after any i samples, source k has had within one of i q_k / P
    position i     -> period i div P, place i mod P: its source, and how often that source came before, by one look-up
    milestones     -> from a given position on, another period; the counts so far are carried

So the n-th sample of a source is arithmetic, whatever came before: there is nothing to save. Deliberately not here:
what a source's samples are (stream.py), and its epochs: those follow from the count.
"""

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import lcm

import numpy as np

from pretrain.errors import ConfigError

MAX_PERIOD = 1_000_000


def period_counts(weights: Sequence[float]) -> list[int]:
    """Returns how many samples of each source make one period.

    Args:
        weights: Positive, taken as the decimals that they are written as: 0.1 is a tenth. Need not sum to one.

    Raises:
        ConfigError: They need a period beyond `MAX_PERIOD`.
    """
    parts = [Fraction(str(weight)) for weight in weights]
    total = sum(parts)
    shares = [part / total for part in parts]
    period = lcm(*(share.denominator for share in shares))
    if period > MAX_PERIOD:
        raise ConfigError(
            f"the weights {list(weights)} repeat only after {period} samples, at most {MAX_PERIOD}",
            fix="write them with fewer digits",
        )
    return [int(share * period) for share in shares]


def build_period(counts: Sequence[int]) -> np.ndarray:
    """Returns the source of each sample of one period, int64 [P].

    Of the sources that may come next without running ahead (the k-th sample of source s not before place
    (k - 1) P / q_s, rounded down), the one whose next sample is due first; of equals the first. After i samples each
    source has had more than i q_s / P - 1 and less than i q_s / P + 1.
    """
    period = sum(counts)
    given = [0] * len(counts)
    order = np.empty(period, dtype=np.int64)
    for place in range(1, period + 1):
        open_sources = [s for s, count in enumerate(counts) if given[s] * period < place * count]
        source = min(open_sources, key=lambda s: Fraction(given[s] + 1, counts[s]))
        order[place - 1] = source
        given[source] += 1
    return order


class MixtureOrder:
    """Maps positions of the run to (source, position in the source).

    Cost: a table of `P x (sources + 1)` integers a segment; a look-up is O(1) a position.
    """

    def __init__(self, segments: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Fixes the order.

        Args:
            segments: (first position, weights) of each stretch of the run, the first at 0, ascending. A weight may be
                0: the source rests.

        Raises:
            ConfigError: Weights that repeat too late.
        """
        assert segments and segments[0][0] == 0 and all(a[0] < b[0] for a, b in pairwise(segments))
        self._starts = [start for start, _ in segments]
        self._segments: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        before = np.zeros(len(segments[0][1]), dtype=np.int64)
        for number, (start, weights) in enumerate(segments):
            awake = [s for s, weight in enumerate(weights) if weight > 0]
            order = np.array(awake)[build_period(period_counts([weights[s] for s in awake]))]
            picked = np.zeros((len(order) + 1, len(weights)), dtype=np.int64)
            picked[np.arange(1, len(order) + 1), order] = 1
            counts = picked.cumsum(axis=0)
            self._segments.append((before.copy(), order, counts))
            if number + 1 < len(segments):
                before = self._counts_in(number, segments[number + 1][0] - start)

    def counts(self, position: int) -> np.ndarray:
        """Returns how many samples of each source the first `position` samples of the run hold, int64 [sources]."""
        number = bisect_right(self._starts, position) - 1
        return self._counts_in(number, position - self._starts[number])

    def _counts_in(self, number: int, place: int) -> np.ndarray:
        before, order, counts = self._segments[number]
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
            before, order, counts = self._segments[number]
            periods, rest = np.divmod(values[mine] - self._starts[number], len(order))
            chosen = order[rest]
            sources[mine] = chosen
            places[mine] = before[chosen] + periods * counts[-1][chosen] + counts[rest, chosen]
        return sources, places
