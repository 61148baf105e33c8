"""Phase of a rank, marked by its main thread, and the heartbeat that publishes it.

A mark costs one assignment (half a microsecond). Every rank makes the same marks in the same order, so that the rank
with the fewest is the one that is behind.
"""

import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, NamedTuple

LONG_PHASES = {"start", "load", "compile", "evaluate", "save", "close"}
LONG_FACTOR = 3
STACK_DEPTH = 8


class Mark(NamedTuple):
    """An entered phase: its running number, name, step, and time of entry (monotonic clock)."""

    number: int
    phase: str
    step: int
    since: float


class Progress:
    """The phase of the main thread. Safe to read from other threads: `now` is replaced as a whole."""

    def __init__(self) -> None:
        self.now = Mark(0, "start", 0, time.monotonic())

    def enter(self, phase: str, step: int | None = None) -> None:
        """Marks that a phase begins; half a microsecond.

        Phases: start, meet, load, compile, data, forward-backward, update, evaluate, save, close.
        """
        last = self.now
        self.now = Mark(last.number + 1, phase, last.step if step is None else step, time.monotonic())

    def go_on(self) -> None:
        """Marks progress within a phase: its time limit restarts."""
        self.enter(self.now.phase)


def limit_of(phase: str, timeout_s: float) -> float:
    """Returns how long a rank may stay in a phase without a mark, seconds."""
    return timeout_s * LONG_FACTOR if phase in LONG_PHASES else timeout_s


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat.

    Attributes:
        rank: Rank of the sender.
        host: Name of its machine.
        pid: Process id.
        number: Number of the heartbeat; it stops growing when the process is stopped or dead.
        marks: Phases entered so far.
        collectives: Collectives begun so far.
        phase: Name of the phase.
        step: Step in progress.
        for_s: Seconds since the phase was entered.
        limit_s: Time limit of the phase, seconds.
        stack: Call stack of the main thread, outermost call first.
    """

    rank: int
    host: str
    pid: int
    number: int
    marks: int
    collectives: int
    phase: str
    step: int
    for_s: float
    limit_s: float
    stack: list[str]

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON."""
        return asdict(self)

    def where(self) -> str:
        """Returns phase, step and duration as part of a sentence."""
        return f"in {self.phase} of step {self.step} for {self.for_s:.0f} s"


class Pulse:
    """Builds this rank's heartbeats."""

    def __init__(self, progress: Progress, rank: int, timeout_s: float, num_collectives: Callable[[], int]) -> None:
        self._progress, self._rank, self._timeout_s = progress, rank, timeout_s
        self._num_collectives = num_collectives
        self._main_thread = threading.main_thread().ident
        self._host, self._number = socket.gethostname(), 0
        self._looking = threading.Lock()

    def beat(self) -> Beat:
        """Returns the next one."""
        self._number += 1
        mark = self._progress.now
        return Beat(
            rank=self._rank,
            host=self._host,
            pid=os.getpid(),
            number=self._number,
            marks=mark.number,
            collectives=self._num_collectives(),
            phase=mark.phase,
            step=mark.step,
            for_s=time.monotonic() - mark.since,
            limit_s=limit_of(mark.phase, self._timeout_s),
            stack=self._stack(),
        )

    def _stack(self) -> list[str]:
        """Returns the call stack of the main thread.

        Garbage collection is off meanwhile: before Python 3.11.9 `sys._current_frames` holds a lock on which a
        finalizer can deadlock (cpython issue 106883).
        """
        with self._looking:  # called by two threads: messenger and watchdog
            is_collecting = gc.isenabled()
            gc.disable()
            try:
                return _stack_of(self._main_thread)
            finally:
                if is_collecting:
                    gc.enable()


def _stack_of(thread: int | None) -> list[str]:
    """Returns the innermost calls of a thread, `folder/file.py:line function` each, outermost first."""
    frame: FrameType | None = sys._current_frames().get(thread or 0)
    calls: list[str] = []
    while frame is not None and len(calls) < STACK_DEPTH:
        path = "/".join(frame.f_code.co_filename.split("/")[-3:])
        calls.append(f"{path}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return calls[::-1]
