"""Where the sources of a mixture that do not repeat end: from there on the others share what was theirs.

    weights by milestone, samples of each source  ->  the same weights, with a milestone more at each end

A source ends at the last position up to which its shares (mixture_due.py) are no more than its samples, so it gives all
of them but for one at most. That is known before the run begins, and so the order stays a pure function of the config.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from pretrain.data.mixture_due import NEVER, Shares, rates_of

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
        shares = Shares([start for start, _ in found], [rates_of(weights) for _, weights in found])
        over = {source: shares.opening(source, supplies[source]) for source in supplies.keys() - ends.keys()}
        known = {source: int(place) - 1 for source, place in over.items() if place != NEVER}
        if not known:
            break
        source = min(known, key=lambda one: (known[one], one))
        ends[source] = known[source]
        found = _rest(found, source, known[source])
        # Behind a gap that no source fills, nothing is ever read.
        found = found[: next((n + 1 for n, (_, weights) in enumerate(found) if not any(weights)), len(found))]
    *rest, (last, weights) = found
    return Ending(found, ends, None) if any(weights) else Ending(rest, ends, last)


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
