"""The stop flag: set by a signal, read by the loop between two steps.

    SIGTERM | SIGUSR1 | SIGINT  ->  flag set  ->  OR-ed over the ranks in a step  ->  commit, exit 75
    before the first step       ->  immediate exit with 75: nothing to save yet
    a second signal             ->  immediate exit with 128 + n; the last commit stays valid
    SIGUSR1 after any           ->  ignored: Slurm and a launcher may each send it, one of them late
    SIGTERM after SIGUSR1       ->  same request, announced by SIGUSR1: time to commit until SIGKILL
    after the last commit       ->  immediate exit with the outcome

A signal only sets the flag; a save inside a handler would see half a step. A thread receives the
signals, because a Python handler waits until the main thread returns from C++: a collective, a
compiler, a socket. It says at once what a signal leads to.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from pretrain.errors import EXIT_RESUME_ME

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_REQUEST_S = 1.0
SAY_S = 0.5
"""Wait for a line to be written, at most: a terminal may take nothing (Ctrl-S)."""

log = logging.getLogger(__name__)


class StopFlag:
    """Remembers the first stop signal of this process; ends the process at the second.

    Repeats within `SAME_REQUEST_S` count as one request: launcher, Slurm and terminal may each
    deliver it. Slurm sends SIGUSR1 to every process of a job step, and its default action kills.
    Therefore SIGUSR1 and SIGUSR2 are blocked in all threads but the one that receives them, and
    children inherit that mask.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.farewell: Callable[[int, str], object] = lambda exit_code, reason: None
        """Called with exit code and reason before a signal ends the process; no reason: noted."""
        self.is_failing: Callable[[], bool] = lambda: False
        """Returns whether a rank has failed: the launcher signals the others."""
        self._first_at = 0.0
        # The first signal was SIGUSR1; the SIGTERM that follows at a job's limit is still to come.
        self._is_announced = False
        self._ends_with: int | None = EXIT_RESUME_ME
        self._is_done = False
        self._installed = False

    def install(self) -> None:
        """Installs the handlers, in the main thread, before any other thread or child is started.

        Signals that a launcher has blocked so far are delivered now.
        """
        if self._installed:
            return
        self._installed = True
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # Signals that arrive during the setup are delivered at its end. SIGUSR1 and SIGUSR2 stay
        # blocked: ignoring them is not enough, as the Go runtime of wandb's service installs a
        # handler for every unblocked signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGUSR2})
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        for number in STOP_SIGNALS:
            signal.signal(number, _leave_to_thread)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        _keep_from_forks()
        threading.Thread(target=self._take, args=(reader,), name="signals", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})

    def arm(self) -> None:
        """Makes the first signal from now on only set the flag, which the loop reads."""
        self._ends_with = None

    def disarm(self, exit_code: int) -> None:
        """Makes a signal from now on end the process at once with `exit_code`: all work is done."""
        self._ends_with = exit_code
        self._is_done = True

    def _take(self, reader: int) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        while True:
            for number in os.read(reader, 64):
                if number in STOP_SIGNALS:
                    self._handle(number)

    def _handle(self, number: int) -> None:
        now = time.monotonic()
        name = signal.Signals(number).name
        if self._ends_with is not None:
            if not self._is_done:
                _say("%s: ended before the first step of this start: nothing to save; the same command continues", name)
            self.farewell(self._ends_with, "" if self._is_done else f"stopped by {name}")
            os._exit(self._ends_with)
        elif self.signal_name is None:
            self.signal_name = name
            self._first_at = now
            self._is_announced = number == signal.SIGUSR1
            effect = "saving and stopping after this step; a second one ends at once, without saving"
            if self.is_failing():
                effect = "a rank has failed: ending without a save"
            _say(f"%s: {effect}", name)
        elif self._is_announced and number == signal.SIGTERM:
            self._first_at = now
            self._is_announced = False
        elif number != signal.SIGUSR1 and now - self._first_at > SAME_REQUEST_S:
            _say("%s again: ended without a save; the same command continues at the last checkpoint", name)
            os._exit(128 + number)

    def __bool__(self) -> bool:
        return self.signal_name is not None


def _say(text: str, name: str) -> None:
    teller = threading.Thread(target=log.info, args=(text, name), daemon=True)
    teller.start()
    teller.join(SAY_S)


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    """Empty handler: with one, the interpreter writes the signal's number into the wakeup pipe."""


def _keep_from_forks() -> None:
    """Keeps the signals of a forked child out of the wakeup pipe, which it inherits."""
    masks: dict[int, set[int]] = {}

    def begin() -> None:
        # Blocked until the child has reset its handlers.
        stops = {signal.SIGTERM, signal.SIGINT}
        masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, stops)

    def end() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop(threading.get_ident()))

    def end_in_child() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        end()

    os.register_at_fork(before=begin, after_in_parent=end, after_in_child=end_in_child)
