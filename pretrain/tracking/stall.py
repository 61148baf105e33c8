"""When a run that sends no rows stands still: patience that grows with how long rows have taken so far."""

import time
from collections.abc import Callable


class StallWatch:
    """Measures the time between rows.

    Args:
        least_s: Shortest time without a row that is a stall. 0: none is.
        clock: Monotonic seconds.
    """

    def __init__(self, least_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._least_s, self._clock = least_s, clock
        self._longest_s = 0.0
        self._seen_at: float | None = None
        self._was_told = False
        self.last_step = 0

    @property
    def patience_s(self) -> float | None:
        """How long to wait for the next row. None: for ever, since it was told, or is not to be told."""
        return None if self._was_told or not self._least_s else max(self._least_s, 3 * self._longest_s)

    def see(self, step: int) -> None:
        """Takes note of a row."""
        now = self._clock()
        if self._seen_at is not None:
            self._longest_s = max(self._longest_s, now - self._seen_at)
        self._seen_at, self._was_told, self.last_step = now, False, step

    def give_up(self) -> None:
        """The patience is over; it is told once until the next row."""
        self._was_told = True
