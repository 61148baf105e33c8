"""Tells a loss that is far above the last ones.

    z = (loss - median) / (1.4826 x median absolute deviation)      over the last losses that were finite

A spike is a loss whose z exceeds the threshold. OLMo-core's SkipStepOptimizer drops steps that are six standard
deviations above the mean of the last 128; PaLM went back to a checkpoint and left the batches out (Chowdhery et al.
2022, section 5.1). Median and MAD are used here because the spikes that are in the window hardly move them: a second
spike behind a first is told as well. Every finite loss enters the window, a spike too, so that a loss that stays high
is the new level once half of the window has it; what is not finite never enters.

All there is to remember is in `TrainState`, so that a run that resumes judges its first loss as it would have. Every
rank sees the same losses and decides alike.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence

MAD_TO_SIGMA = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""
LEAST_SIGMA = 1e-3
"""Of the median: a loss that hardly moves is no reason to call a tenth of a percent a spike."""

TINY = 1e-30


class SpikeDetector:
    """Judges the losses of a run, one a step. Costs some 10 us for a loss above the median, 1 us for one below.

    Args:
        window: Losses that are remembered.
        threshold: See above.
        losses: Those remembered so far, oldest first.
    """

    def __init__(self, window: int, threshold: float, losses: Iterable[float] = ()) -> None:
        self._losses, self._threshold = deque(losses, maxlen=window), threshold
        self._ordered = sorted(self._losses)

    @property
    def losses(self) -> tuple[float, ...]:
        """What is to be remembered, oldest first."""
        return tuple(self._losses)

    def deviation(self, loss: float) -> float:
        """Returns z of a loss that has not entered yet; 0 where it is below the median, or too few have entered.

        A loss that is not finite is no spike: another part of the guard has it (bad_step.py).
        """
        if 2 * len(self._losses) < (self._losses.maxlen or 0) or not math.isfinite(loss):
            return 0.0
        median = _middle(self._ordered)
        if loss <= median:
            return 0.0
        sigma = MAD_TO_SIGMA * _middle(sorted([abs(value - median) for value in self._ordered]))
        return (loss - median) / max(sigma, LEAST_SIGMA * abs(median), TINY)

    def is_spike(self, loss: float) -> bool:
        """Returns whether a loss that has not entered yet is a spike."""
        return self.deviation(loss) > self._threshold

    def add(self, loss: float) -> None:
        """Lets the loss of a step enter, if it is finite."""
        if not math.isfinite(loss):
            return
        if len(self._losses) == self._losses.maxlen:
            del self._ordered[bisect_left(self._ordered, self._losses[0])]
        self._losses.append(loss)
        insort(self._ordered, loss)

    def forget(self) -> None:
        """Forgets all losses: those that come are of another level."""
        self._losses.clear()
        self._ordered.clear()


def _middle(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
