"""Skipped samples: ranges of positions that a run jumps over, and rows that cannot be read.

    place     0, 1, 2, ...                       count of the samples that are trained on
    position  0, 1, 2, ..., from-1, to, to+1     their position in the order (order.py); from .. to-1 are never read

A rollback after a loss spike continues behind the samples of the spike (Chowdhery et al. 2022, PaLM, section 5.1).
Every other sample still comes exactly once, on any number of ranks; the cursor of a run stays a position, with the same
meaning under ranges that are added later.

    DataError while a row is read  ->  stop: raised again
                                   ->  skip: the row keeps its place and its sample id, and has no targets; one warning
                                       for each damaged member, each row counted
    the loop, with the sum over the ranks  ->  check: beyond the limit an error, on all ranks at the same step

Order and number of rows are those without damage, on every rank.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pretrain.errors import DataError
from pretrain.rows import PairRows, TokenRows
from pretrain.shards.reader import ShardReader, ShardSet
from pretrain.shards.store import UnavailableError


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
        """Returns the place of a position: the samples that are trained on before it."""
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


_log = logging.getLogger(__name__)


class DamagePolicy:
    """Decides for the streams of one split, and keeps count. Safe to use from several threads.

    Args:
        on_error: `stop` or `skip`.
        max_skipped_rows: Rows that may be skipped before `check` ends the run.
    """

    def __init__(self, on_error: Literal["stop", "skip"] = "stop", max_skipped_rows: int = 0) -> None:
        self._skips, self._limit = on_error == "skip", max_skipped_rows
        self._lock = threading.Lock()
        self._rows: set[tuple[str, int]] = set()
        self._warned: set[tuple[str, str]] = set()

    @property
    def num_skipped_rows(self) -> int:
        """Number of skipped rows, each counted once."""
        return len(self._rows)

    def skip(self, error: DataError, shards: ShardSet, sample: int) -> None:
        """Counts a sample of `shards` that cannot be read. Raises: DataError: `error`, where damage stops the run."""
        if not self._skips or isinstance(error, UnavailableError):
            raise error
        folder = str(shards.folder)
        with self._lock:
            self._rows.add((folder, sample))
            is_new = (folder, str(error)) not in self._warned
            self._warned.add((folder, str(error)))
        if is_new:
            _log.warning("rows are skipped in %s: %s", folder, error)

    def check(self, num_rows: int) -> None:
        """Checks the rows that all ranks have skipped against the limit. Raises: DataError."""
        if num_rows > self._limit:
            raise DataError(
                f"{num_rows} rows cannot be read, more than data.max_skipped_rows={self._limit}",
                fix="see the warnings of all ranks, and copy the damaged shards again, or raise the limit",
            )

    def reader(self, shards: ShardSet) -> Callable[[int], ShardReader]:
        """Returns a function that opens a shard by its number.

        Where rows are skipped and shards are fetched, an unavailable shard is waited for once, not for each row.
        """
        if not (self._skips and shards.store.fetches):
            return shards.reader
        failed: dict[int, DataError] = {}

        def read(number: int) -> ShardReader:
            if number in failed:
                raise failed[number]
            try:
                return shards.reader(number)
            except UnavailableError:
                raise
            except DataError as error:
                failed[number] = error
                raise

        return read


def count_skipped(rows: TokenRows | PairRows) -> int:
    """Returns the number of skipped rows of a training batch: those without a single token."""
    target = rows.target if isinstance(rows, PairRows) else rows
    return 0 if target.num_tokens is None else int((target.num_tokens == 0).sum())
