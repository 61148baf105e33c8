"""The stop flag: a signal asks, the loop decides.

    SIGTERM | SIGUSR1 | SIGINT  ->  flag set  ->  OR-ed over the ranks with the step's values  ->  commit, exit 75
    before the first step       ->  the process ends at once with 75: there is nothing to save yet
    a second signal             ->  the process ends at once; the last commit stays valid
    SIGUSR1 after any           ->  nothing: it announces an end, and Slurm and a launcher may each send it, one late
    SIGTERM after SIGUSR1       ->  the end that the first announced: what is left until SIGKILL is used to commit
    after the last commit       ->  the process ends at once with its outcome

A signal only sets the flag: saving inside a handler is how checkpoints get torn. A thread takes the signals: a handler
would have to wait until the main thread leaves the C++ that it is in, a collective, a compiler or a server.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from pretrain.errors import EXIT_RESUME_ME

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_REQUEST_S = 1.0


class StopFlag:
    """Remembers the first stop signal of this process; ends the process at the second.

    Repeats within a second of the first are one request: launcher, Slurm and terminal may each deliver it.

    Slurm sends SIGUSR1 to every process of a step, whose default is to die of it. Here it is blocked in all threads
    but the one that takes it, and children inherit the mask of the thread that starts them; SIGUSR2 likewise.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.farewell: Callable[[int, str], object] = lambda exit_code, reason: None
        """Called with exit code and reason before a signal ends the process at once; no reason: all is noted."""
        self._first_at = 0.0
        self._is_announced = False
        """The first signal was SIGUSR1, and the SIGTERM that follows at a job's limit has not come yet."""
        self._ends_with: int | None = EXIT_RESUME_ME
        self._is_done = False
        self._installed = False

    def install(self) -> None:
        """Takes over the stop signals, before any other thread or child is started. Must be called in the main thread.

        Signals that a launcher has held back (blocked) so far come now.
        """
        if self._installed:
            return
        self._installed = True
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # Those that come before all is set up come at its end: nobody would hear of them in between. SIGUSR1 and
        # SIGUSR2 stay blocked, for they may not be only ignored: Go, and so wandb's service, takes a handler for all
        # that is not blocked.
        signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGUSR2})
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        for number in STOP_SIGNALS:
            signal.signal(number, _leave_to_thread)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        fork = _Fork()
        os.register_at_fork(before=fork.begin, after_in_parent=fork.end, after_in_child=fork.end_in_child)
        threading.Thread(target=self._take, args=(reader,), name="signals", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})

    def arm(self) -> None:
        """From now on the first signal only sets the flag: there is a loop that looks at it."""
        self._ends_with = None

    def disarm(self, exit_code: int) -> None:
        """From now on a signal ends the process at once with `exit_code`: what there was to do is done."""
        self._ends_with, self._is_done = exit_code, True

    def _take(self, reader: int) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        while True:
            for number in os.read(reader, 64):
                if number in STOP_SIGNALS:
                    self._handle(number)

    def _handle(self, number: int) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if self._ends_with is not None:
            self.farewell(self._ends_with, "" if self._is_done else f"stopped by {name}")
            os._exit(self._ends_with)
        elif self.signal_name is None:
            self.signal_name = name
            self._first_at, self._is_announced = now, number == signal.SIGUSR1
        elif self._is_announced and number == signal.SIGTERM:
            self._first_at, self._is_announced = now, False
        elif number != signal.SIGUSR1 and now - self._first_at > SAME_REQUEST_S:
            os._exit(128 + number)

    def __bool__(self) -> bool:
        return self.signal_name is not None


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    """The handler proper: that there is one makes the interpreter write the signal's number into the pipe."""


class _Fork:
    """Sees to it that the signals of a fork are not taken for the run's, whose pipe it inherits."""

    def __init__(self) -> None:
        self._masks: dict[int, set[int]] = {}

    def begin(self) -> None:
        """Holds signals back: the child could get one before it is its own."""
        self._masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})

    def end(self) -> None:
        """In the parent: goes on as before."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.pop(threading.get_ident()))

    def end_in_child(self) -> None:
        """In the child: nothing is special about its signals."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.end()
