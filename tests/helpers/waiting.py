"""Waits for events: the only file of the tests that sleeps or reads a clock (`tests/repo/test_clocks.py`).

    wait_until(path.exists, "the rank's note")              polls until the condition is true, and returns its value
    wait_until(is_held, "a held rank", while_running=job)    fails at once when the process ends first
    output, errors = finish(process)                         waits for a process's end
    hang()                                                   in a child process: never returns, whatever signals do

No test depends on how fast a machine is: a wait ends with its event. `LIMIT_S` is for what hangs.
"""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")

LIMIT_S = 600
"""The limit of every wait, in seconds: far above what a loaded machine takes for any event that comes at all."""

POLL_S = 0.005


def wait_until(
    condition: Callable[[], Value],
    what: str = "",
    while_running: subprocess.Popen[Any] | Callable[[], object] | None = None,
    *,
    say: Callable[[], object] = str,
    pause_s: float = POLL_S,
) -> Value:
    """Polls until a condition is true; returns its value.

    Args:
        condition: Called until it returns a true value.
        what: The event, named in a failure.
        while_running: The process that brings the event about, or a function that tells whether it runs.
        say: Tells what is instead, for the failure; a process that has ended may be read there.
        pause_s: Between two calls of a condition that costs more than a look.

    Raises:
        AssertionError: The process ended before the event, or the event did not come within `LIMIT_S`.
    """
    deadline = time.monotonic() + LIMIT_S
    while True:
        runs = while_running is None or (
            while_running.poll() is None if isinstance(while_running, subprocess.Popen) else bool(while_running())
        )
        if value := condition():  # asked after the process: an event right before its end counts
            return value
        assert runs, f"the process ended before this event: {what}\n{say()}"
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {what}\n{say()}"
        time.sleep(pause_s)


def finish(process: subprocess.Popen[Any], text: Any = None) -> tuple[Any, Any]:
    """Sends `text` to a process and waits for its end; returns its stdout and stderr. Kills one that hangs."""
    try:
        return process.communicate(text, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        raise AssertionError(f"{process.args} did not end within {LIMIT_S} s: {output}{errors}") from None


def hang() -> None:
    """Stands still until the process is killed; a signal whose handler returns does not end it."""
    while True:
        poll_pause()  # signal.pause() would sleep through a signal that comes just before it


def poll_pause() -> None:
    """Leaves the processor for a moment, in a loop that goes on until it is ended."""
    time.sleep(POLL_S)


def pass_time(seconds: float) -> None:
    """Lets a random or a real time pass: for drills alone, whose outcome must not depend on it."""
    time.sleep(seconds)


def make_old(path: Path, seconds: float) -> None:
    """Sets a file's times to `seconds` ago."""
    os.utime(path, (time.time() - seconds,) * 2)


def stopwatch() -> Callable[[], float]:
    """Returns a function that tells the seconds since this call: to be printed, never asserted."""
    begun = time.monotonic()
    return lambda: time.monotonic() - begun
