"""Policy for rows that cannot be read.

    DataError while a row is read  ->  stop: raised again
                                   ->  skip: the row keeps its place and its sample id, and has no
                                       targets; one warning for each damaged member
    the loop, with the sum over the ranks  ->  check: beyond the limit an error, on all ranks at
                                               the same step

Order and number of rows are those without damage, on every rank.
"""

import logging
import threading
from collections.abc import Callable
from typing import Literal

from pretrain.errors import DataError
from pretrain.shards.reader import ShardReader, ShardSet
from pretrain.shards.store import UnavailableError

_log = logging.getLogger(__name__)


class DamagePolicy:
    """Decides for the streams of one split, and counts skipped rows; `skips`: it allows some. Thread-safe."""

    def __init__(self, on_error: Literal["stop", "skip"] = "stop", max_skipped_rows: int = 0) -> None:
        self.skips = on_error == "skip"
        self._limit = max_skipped_rows
        self._lock = threading.Lock()
        self._rows: set[tuple[str, int]] = set()
        self._warned: set[tuple[str, str]] = set()

    @property
    def num_skipped_rows(self) -> int:
        """Number of skipped rows, each counted once."""
        return len(self._rows)

    def skip(self, error: DataError, shards: ShardSet, sample: int) -> None:
        """Counts a sample that cannot be read. Raises: DataError: `error`, unless rows are skipped."""
        if not self.skips or isinstance(error, UnavailableError):
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
        """Returns a function that opens a shard by its number."""
        # A damaged shard that was fetched is fetched again once, not for each row that is skipped.
        if not (self.skips and shards.store.fetches):
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
