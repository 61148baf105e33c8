"""Where the sources of a mixture that do not repeat end: from there on the others share what was theirs.

    weights by milestone, samples of each source  ->  the same weights, with a milestone more at each end

A source ends at the last position up to which its shares (mixture_due.py) are no more than its samples, so it gives all
of them but for one at most. That is known before the run begins, and so the order stays a pure function of the config.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from math import floor
from typing import NamedTuple

Segment = tuple[int, list[float]]
"""First position, and weight of each source from there on."""


class Ending(NamedTuple):
    """A mixture whose sources end.

    Attributes:
        segments: Weights of each stretch, 0 for what has ended.
        ends: First position from which on a source rests for good, by its number; of those that end.
        end: First position for which there is no source any more; None: there always is one.
    """

    segments: list[Segment]
    ends: dict[int, int]
    end: int | None


def end_sources(segments: Sequence[tuple[int, Sequence[float]]], supplies: Mapping[int, int]) -> Ending:
    """Lets sources rest from where they end.

    Args:
        segments: (first position, weights) of each stretch, the first at 0, ascending.
        supplies: Samples of each source that does not repeat, by its number.
    """
    found: list[Segment] = [(start, list(weights)) for start, weights in segments]
    ends: dict[int, int] = {}
    while True:
        lasting = {source: _last_position(found, source, supplies[source]) for source in supplies.keys() - ends.keys()}
        known = {source: position for source, position in lasting.items() if position is not None}
        if not known:
            break
        source = min(known, key=lambda one: (known[one], one))
        ends[source] = known[source]
        found = _rest(found, source, known[source])
        # Behind a gap that no source fills, nothing is ever read.
        found = found[: next((n + 1 for n, (_, weights) in enumerate(found) if not any(weights)), len(found))]
    *rest, (last, weights) = found
    return Ending(found, ends, None) if any(weights) else Ending(rest, ends, last)


def _last_position(segments: Sequence[Segment], source: int, supply: int) -> int | None:
    """Returns the last position up to which a source's shares are at most `supply`; None where they always are."""
    had = Fraction(0)
    for (start, weights), stop in zip(segments, [*(start for start, _ in segments[1:]), None], strict=True):
        rate = Fraction(str(weights[source])) / (sum(Fraction(str(weight)) for weight in weights) or 1)
        if rate and (stop is None or had + rate * (stop - start) > supply):
            return start + floor((supply - had) / rate)
        had += rate * (stop - start) if stop is not None else 0
    return None


def _rest(segments: Sequence[Segment], source: int, position: int) -> list[Segment]:
    """Returns the segments with a source at rest from `position` on."""
    starts = sorted({position, *(start for start, _ in segments)})
    found: list[Segment] = []
    for start in starts:
        weights = list(next(row for first, row in reversed(segments) if first <= start))
        if start >= position:
            weights[source] = 0.0
        found.append((start, weights))
    assert all(a[0] < b[0] for a, b in pairwise(found))
    return found
