"""A clock that goes on only when somebody sleeps, in the place of the module `time`: waits are exact, and take none."""


class FakeClock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """As `time.monotonic`."""
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        """As `time.sleep`, at once."""
        self.now += seconds
