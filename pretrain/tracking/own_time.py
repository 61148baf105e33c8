"""Time that this rank needs for its work on a busy machine: a slow rank, but no slow neighbours.

    start, stop      the clock, without waits for a core
    with waiting()   nor waits for other ranks
    end_step         over the thread's CPU time, times the usual one of the last steps

A process that is stopped, or waits for its memory or disk, takes more time than CPU time. A
neighbour that takes a share of caches and cores raises both for seconds, which is not this rank's;
a slow core does so for good, and is usual then.
"""

import contextlib
import functools
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

STEPS = 201
"""Steps of which the median CPU time is the usual one."""
FEWEST = 24
"""Steps before there is one."""
_EVERY = 8


def core_wait_s() -> float:
    """Returns seconds that this thread was ready to run, without a core; 0: the system does not say."""
    file = _open_schedstat(os.getpid(), threading.get_native_id())
    return 0.0 if file is None else int(os.pread(file, 64, 0).split()[1]) / 1e9


@functools.cache
def _open_schedstat(pid: int, thread: int) -> int | None:
    """Opens the counters of a thread of this process, for as long as it lives."""
    try:
        return os.open(f"/proc/{pid}/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # not Linux, or a kernel without them
        return None


class OwnTime:
    """Times pieces of the steps of one thread."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        core_wait: Callable[[], float] = core_wait_s,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clocks = (clock, core_wait, cpu)
        self._begun: tuple[float, float] | None = None
        self._spent = self._cpu = 0.0
        self._recent: deque[float] = deque(maxlen=STEPS)
        self._num_steps = 0
        self._usual = 0.0

    def _read(self) -> tuple[float, float]:
        clock, core_wait, cpu = self._clocks
        return clock() - core_wait(), cpu()

    def start(self) -> None:
        """Begins a piece of work."""
        self._begun = self._read()

    def stop(self) -> None:
        """Ends it."""
        if self._begun is not None:
            spent, cpu = self._read()
            self._spent += spent - self._begun[0]
            self._cpu += cpu - self._begun[1]
            self._begun = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Leaves the body out."""
        is_at_work = self._begun is not None
        self.stop()
        yield
        if is_at_work:
            self.start()

    def end_step(self) -> float:
        """Ends a step; returns its seconds at the usual CPU time; 0: none, or none is usual yet."""
        spent, cpu = self._spent, self._cpu
        self._spent = self._cpu = 0.0
        if spent <= 0 or cpu <= 0:
            return 0.0
        self._recent.append(cpu)
        if len(self._recent) >= FEWEST and self._num_steps % _EVERY == 0:
            self._usual = statistics.median(self._recent)
        self._num_steps += 1
        return spent / cpu * self._usual
