"""Positions that a run leaves out: ranges of the data order that are jumped over, as if it had never had them.

    place     0, 1, 2, ...                       the samples that are trained on, counted
    position  0, 1, 2, ..., from-1, to, to+1     where they lie in the order (order.py); from .. to-1 are never read

A rollback after a loss spike goes on behind the samples that were before it (Chowdhery et al. 2022, PaLM, section 5.1).
The two numbers count up together, so every other sample still comes exactly once, on any number of ranks; the cursor
of a run stays a position, which means the same under whatever ranges are added later.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SkipRanges:
    """Ascending ranges [from, to) of positions that neither touch nor overlap. Make it with `of`."""

    ranges: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(pairs: Iterable[Sequence[Any]]) -> "SkipRanges":
        """Returns the union of some ranges. Raises: ValueError: One is no pair of whole numbers, 0 <= from < to."""
        merged: list[tuple[int, int]] = []
        for first, end in sorted(_checked(pair) for pair in pairs):
            if merged and first <= merged[-1][1]:
                first, end = merged[-1][0], max(end, merged.pop()[1])
            merged.append((first, end))
        return SkipRanges(tuple(merged))

    def place_of(self, position: int) -> int:
        """Returns how many samples are trained on before a position."""
        return position - sum(min(end, position) - first for first, end in self.ranges if first < position)

    def position_of(self, place: int) -> int:
        """Returns the position of the sample that is trained on after `place` others."""
        for first, end in self.ranges:
            if place < first:
                break
            place += end - first
        return place

    def spans(self, places: range) -> list[range]:
        """Returns the positions of consecutive places, as ranges: one, but where a skipped range lies within."""
        spans, place = [], places.start
        while place < places.stop:
            position = self.position_of(place)
            until = next((first for first, _ in self.ranges if first > position), None)
            length = places.stop - place if until is None else min(places.stop - place, until - position)
            spans.append(range(position, position + length))
            place += length
        return spans


def _checked(pair: Sequence[Any]) -> tuple[int, int]:
    first, end = pair
    if type(first) is not int or type(end) is not int or not 0 <= first < end:
        raise ValueError(f"[{first}, {end}] is not a range of positions")
    return first, end


NO_SKIPS = SkipRanges()
