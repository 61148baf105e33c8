"""Figures of a run: memory, loss by source, speed."""

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Returns `memory_bytes`, and on CUDA `memory_reserved_bytes`; takes some 10 us. Of this rank alone.

    On CUDA: peak of allocated tensors, and peak of memory reserved by the allocator, which must fit. On a CPU: resident
    memory of the process now.
    """
    if device.type != "cuda":
        return {"memory_bytes": float(_resident_bytes())}
    peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return {"memory_bytes": float(peak), "memory_reserved_bytes": float(reserved)}


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: the peak
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


# The loss of each source of a mixture: the mean over its targets since the last row of metrics, as a
# single step may have few targets of a rare source, or none.


class SourceLosses:
    """Sums of loss and targets by source.

    Args:
        names: Names of the sources, in the order of the config.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._sums = [0.0] * (2 * len(names))

    def add(self, by_source: Sequence[float]) -> None:
        """Adds a step: the sum of -log p(target) over each source, then the targets of each; empty with one source."""
        for place, value in enumerate(by_source):
            self._sums[place] += value

    def take(self) -> dict[str, float]:
        """Returns `loss_NAME` of each source that had targets since the last call."""
        count = len(self._names)
        sums, self._sums = self._sums, [0.0] * (2 * count)
        pairs = zip(self._names, sums[:count], sums[count:], strict=True)
        return {f"loss_{name}": total / targets for name, total, targets in pairs if targets}


# Speed of a run over a sliding window: tokens/s, step time, data wait, MFU, time left.
#
#     with meter.data_wait(): batch = next(batches)
#     meter.end_step(tokens)                     # that the model read, over all ranks
#     with meter.excluded(): evaluate()          # neither a step's time nor its wait
#     metrics |= meter.read(step)
#
# A token is one that the model reads: without padding, with positions that have no loss, and of two
# stacks both. So speed is comparable between objectives.
#
# Not here: FLOPs a token, which `pretrain.plan.flops` counts; and device synchronisation: times are
# host times, right over a window once the queue of a device is full.


PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}

"""Dense bf16 FLOP/s of a device, by a part of its name."""


def peak_flops(device_name: str) -> float | None:
    """Returns the dense bf16 peak of a device by its name (`torch.cuda.get_device_name()`), or None if unknown."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in device_name), None)


@dataclass(frozen=True, slots=True)
class _Step:
    seconds: float
    wait: float
    tokens: int


class Meter:
    """Times the steps of a run.

    Args:
        total_steps: Steps of the run, for the time left.
        flops_per_token: Training FLOPs of one token that is read: those of a whole row over its tokens, so that rows
            with padding count in proportion to what they hold. None: no MFU.
        peak: FLOP/s of all devices of the job together. None: no MFU.
        window_steps: Steps over which figures are averaged.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        flops_per_token: float | None = None,
        peak: float | None = None,
        window_steps: int = 50,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._total_steps = total_steps
        self._flops_per_token, self._peak = flops_per_token, peak
        self._clock = clock
        self._steps: deque[_Step] = deque(maxlen=window_steps)
        self._wait = 0.0
        self._mark = clock()

    @contextlib.contextmanager
    def data_wait(self) -> Iterator[None]:
        """Times the body as waiting for data."""
        start = self._clock()
        yield
        self._wait += self._clock() - start

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """Leaves the body's time out: evaluation, saving, compilation."""
        start = self._clock()
        yield
        self._mark += self._clock() - start

    def end_step(self, tokens: int) -> None:
        """Ends a step whose model read `tokens` tokens over all ranks; the next one starts now."""
        now = self._clock()
        self._steps.append(_Step(now - self._mark, self._wait, tokens))
        self._mark, self._wait = now, 0.0

    def read(self, step: int) -> dict[str, float]:
        """Returns figures over the window, after `step` steps of the run are done.

        Returns:
            `tokens_per_s`, `step_time_s`, `data_wait` (part of the time, 0 to 1), `eta_s`, and `mfu` (0 to 1) where
            FLOPs and peak are known. Empty before the first step.
        """
        seconds = sum(entry.seconds for entry in self._steps)
        if not seconds:
            return {}
        tokens_per_s = sum(entry.tokens for entry in self._steps) / seconds
        step_time = seconds / len(self._steps)
        figures = {
            "tokens_per_s": tokens_per_s,
            "step_time_s": step_time,
            "data_wait": sum(entry.wait for entry in self._steps) / seconds,
            "eta_s": max(0, self._total_steps - step) * step_time,
        }
        if self._flops_per_token and self._peak:
            figures["mfu"] = tokens_per_s * self._flops_per_token / self._peak
        return figures
