"""Growth of this process's memory over the steps of a run: a leak, named before the node is full.

    each step        bytes of its own  ->  up to 64 samples; of more, every other is dropped
    newest half      least bytes of each quarter rise, the last above all of the first
                     ->  bytes a step
    and              memory is left for fewer steps than the run has, and not ten times those seen

The last rule leaves out what a start allocates: a fast leak is named within minutes, a slow one
once a tenth of its time has passed.
"""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

MOST_SAMPLES = 64
AHEAD = 10
_LEAST_LAST = 0.5
"""Growth of the last quarter over the mean growth of the others: less is a growth that ends."""

_Sample = tuple[int, int]


def own_bytes() -> int:
    """Returns bytes that this process alone has, and no file; 0 where the system does not say."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_bytes().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def growth_of(samples: Sequence[_Sample]) -> float:
    """Returns bytes a step by which samples (step, bytes) grow all the time; 0 if they do not."""
    each = len(samples) // 4
    if each < 4:
        return 0.0
    quarters = [samples[number * each : (number + 1) * each] for number in range(4)]
    lows = [min(quarter, key=lambda sample: sample[1]) for quarter in quarters]
    rises = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(lows)]
    is_noise = lows[-1][1] <= max(num_bytes for _, num_bytes in quarters[0])
    if is_noise or min(rises) <= 0 or rises[-1] < _LEAST_LAST * (rises[0] + rises[1]) / 2:
        return 0.0
    return (lows[-1][1] - lows[0][1]) / (lows[-1][0] - lows[0][0])


class MemoryGrowth:
    """Samples of a process over its steps."""

    def __init__(self) -> None:
        self._samples: list[_Sample] = []
        self._every = 1

    def is_due(self, step: int) -> bool:
        """Returns whether a sample is due at a step."""
        return not self._samples or step - self._samples[-1][0] >= self._every

    def add(self, step: int, num_bytes: int) -> None:
        """Adds a sample."""
        self._samples.append((step, num_bytes))
        if len(self._samples) == MOST_SAMPLES:
            self._samples = self._samples[1::2]
            self._every *= 2

    @property
    def bytes_a_step(self) -> float:
        """Growth of the newest half of the samples; 0: there is none."""
        half = len(self._samples) // 2
        return growth_of(self._samples[half:]) if half >= MOST_SAMPLES // 4 else 0.0

    def is_leak(self, steps_left: float, steps_to_go: int) -> bool:
        """Returns whether room for `steps_left` steps is too little for `steps_to_go` more."""
        seen = self._samples[-1][0] - self._samples[0][0]
        return steps_left < min(steps_to_go, AHEAD * seen)
