"""The stop flag: a signal asks, the loop decides.

    SIGTERM | SIGUSR1 | SIGINT  ->  flag set  ->  OR-ed over the ranks with the step's values  ->  commit, exit 75
    before the first step       ->  the process ends at once with 75: there is nothing to save yet
    a second signal             ->  the process ends at once; the last commit stays valid

A handler only sets the flag: saving inside a handler is how checkpoints get torn.
"""

import os
import signal
import time
from types import FrameType

from pretrain.errors import EXIT_RESUME_ME

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_REQUEST_S = 1.0


class StopFlag:
    """Remembers the first stop signal of this process; ends the process at the second.

    Repeats within a second of the first are one request: launcher, Slurm and terminal may each deliver it.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._first_at = 0.0
        self._armed = False

    def install(self) -> None:
        """Takes over the stop signals. Must be called in the main thread."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def arm(self) -> None:
        """From now on the first signal only sets the flag: there is a loop that looks at it."""
        self._armed = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._armed:
            os._exit(EXIT_RESUME_ME)
        elif self.signal_name is None:
            self.signal_name = signal.Signals(number).name
            self._first_at = now
        elif now - self._first_at > SAME_REQUEST_S:
            os._exit(128 + number)

    def __bool__(self) -> bool:
        return self.signal_name is not None
