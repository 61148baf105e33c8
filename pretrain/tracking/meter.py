"""Measurements of a run: memory, loss by source, speed, time by part, and traces of single steps.

    with phases("data", step): ...     the heartbeat, the meter and the timeline are in this phase
    meter.end_step(tokens)             tokens that the model read, over all ranks
    with meter.excluded(): ...         neither a step's time nor its wait for data
    timeline.end_step()
    metrics |= meter.read(step) | timeline.take() | sources.take() | memory_metrics(device)

Times of a step are host times, right over a window once the queue of a device is full.
"""

import contextlib
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from pretrain.config.tracking import ProfileConfig
from pretrain.errors import DiskError
from pretrain.plan.gpus import GPUS, name_of_device
from pretrain.run.heartbeat import Progress
from pretrain.tracking.own_time import OwnTime
from pretrain.utils.io import make_dir, write_file

log = logging.getLogger(__name__)


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Returns `memory_bytes`, and on CUDA `memory_reserved_bytes`, of this rank; takes some 10 us.

    On CUDA: peak of allocated tensors, and peak of memory reserved by the allocator, which must
    fit. On a CPU: resident memory of the process now.
    """
    if device.type != "cuda":
        return {"memory_bytes": float(_resident_bytes())}
    return {
        "memory_bytes": float(torch.cuda.max_memory_allocated(device)),
        "memory_reserved_bytes": float(torch.cuda.max_memory_reserved(device)),
    }


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: the peak
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


class SourceLosses:
    """Mean loss of each source of a mixture since the last row: a step may lack targets of one."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._sums = [0.0] * (2 * len(names))

    def add(self, by_source: Sequence[float]) -> None:
        """Adds a step: sums of -log p(target), then of targets, by source; empty for one."""
        for place, value in enumerate(by_source):
            self._sums[place] += value

    def take(self) -> dict[str, float]:
        """Returns `loss_NAME` of each source that had targets since the last call."""
        count = len(self._names)
        sums = self._sums
        self._sums = [0.0] * (2 * count)
        pairs = zip(self._names, sums[:count], sums[count:], strict=True)
        return {f"loss_{name}": total / targets for name, total, targets in pairs if targets}


def peak_flops(device_name: str) -> float | None:
    """Returns the dense bf16 peak of a device (`torch.cuda.get_device_name()`); None: unknown."""
    name = name_of_device(device_name)
    return None if name is None else GPUS[name].flops


class Meter:
    """Speed of a run over a sliding window: tokens/s, step time, data wait, MFU, time left.

    A token is one that the model reads: without padding, with positions that have no loss, and of
    two stacks both. So speed is comparable between objectives.

    `tokens_before` and `flops_before` return those of all steps before a step, of rows without
    padding. The time left is in proportion to FLOPs, or if they are not known, tokens. MFU needs
    them and the peak FLOP/s of all devices together; rows with padding count by their content.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        tokens_before: Callable[[int], int] = int,
        flops_before: Callable[[int], float] | None = None,
        peak: float | None = None,
        window_steps: int = 50,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._total_steps = total_steps
        self._tokens_before = tokens_before
        self._flops_before = flops_before
        self._peak = peak
        self._clock = clock
        self._steps: deque[tuple[float, float, int]] = deque(maxlen=window_steps)
        self._wait = 0.0
        self._is_warming = True
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
        if self._is_warming and self._steps:
            # The first step compiles, allocates and opens shards.
            self._steps.clear()
            self._is_warming = False
        self._steps.append((now - self._mark, self._wait, tokens))
        self._mark = now
        self._wait = 0.0

    def read(self, step: int) -> dict[str, float]:
        """Returns `tokens_per_s`, `step_time_s`, `data_wait` (0 to 1), `eta_s`, and `mfu` if known.

        Over the window, after `step` steps of the run are done; empty before the first. The first
        step of a process counts until the second is done.
        """
        totals = [sum(column) for column in zip(*self._steps, strict=True)]
        if not totals or not totals[0]:
            return {}
        seconds, wait, tokens = totals
        step_time = seconds / len(self._steps)
        work_before = self._flops_before or self._tokens_before
        first = step - len(self._steps)
        start, done, end = map(work_before, (first, step, max(step, self._total_steps)))
        figures = {
            "tokens_per_s": tokens / seconds,
            "step_time_s": step_time,
            "data_wait": wait / seconds,
            "eta_s": (end - done) / (done - start) * seconds,
        }
        if self._flops_before and self._peak:
            of_token = (done - start) / (self._tokens_before(step) - self._tokens_before(first))
            figures["mfu"] = figures["tokens_per_s"] * of_token / self._peak
        return figures


PARTS = ("data", "forward", "backward", "optimizer", "communication", "evaluation", "checkpoint", "other")


class Timeline:
    """Seconds of a step by part; together they are the time that passed.

    On a CPU parts are cut by the clock. On CUDA, where the host runs ahead, they are cut by events
    on the stream, read a step late, so that nothing waits for them: a part lasts until the device
    has done its work. A cut costs about 0.3 us on the host, 3 us with events.

    Not here: communication inside the engine. Gradients are reduced under the backward pass, and
    weights gathered under the optimizer: the exposed share counts there. `communication` is the
    wait for the exchange of the loop, which ends when the slowest rank has come; a profile
    (`profile.steps`) shows every collective by itself.
    """

    def __init__(self, on_cuda: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = _record_event if on_cuda else clock
        self._on_cuda = on_cuda
        self.part = "other"
        """The part that runs."""
        self._since = self._clock()
        self._cuts: deque[tuple[str, Any, Any]] = deque()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._num_steps = 0
        self._forward = 0.0
        self.own = OwnTime()
        """Forward passes, on a CPU."""
        self.forward_s = 0.0
        """Time that this rank needed for the last step's forward passes: on a CPU that of `own`."""

    def enter(self, part: str) -> None:
        """Ends the part that runs, and begins another, one of PARTS."""
        now = self._clock()
        if self._on_cuda:
            self._cuts.append((self.part, self._since, now))  # read once they are done
        else:
            self._seconds[self.part] += now - self._since
            if part == "forward":
                self.own.start()
            elif self.part == "forward":
                self.own.stop()
        self.part = part
        self._since = now

    @contextlib.contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Counts the body as `part`; then the part that ran before continues."""
        before = self.part
        self.enter(part)
        yield
        self.enter(before)

    def after_forward(self, *_: object) -> None:
        """A forward hook of the trained module: the backward pass follows, but in an evaluation."""
        if self.part == "forward":
            self.enter("backward")

    def end_step(self) -> None:
        """Ends a step; the time until the next part is `other`."""
        self.enter("other")
        self._num_steps += 1
        self._read_cuts()
        self.forward_s = self._forward if self._on_cuda else self.own.end_step()
        self._forward = 0.0

    def _read_cuts(self) -> None:
        while self._cuts and self._cuts[0][2].query():
            part, start, end = self._cuts.popleft()
            seconds = start.elapsed_time(end) / 1e3
            self._seconds[part] += seconds
            self._forward += seconds * (part == "forward")

    def take(self) -> dict[str, float]:
        """Returns `data_s` and so on: seconds a step since the last call, without parts of 0 s."""
        self._read_cuts()
        steps = self._num_steps
        if not steps:
            return {}
        times = {f"{part}_s": value / steps for part, value in self._seconds.items() if value}
        self._num_steps = 0
        self._seconds = dict.fromkeys(PARTS, 0.0)
        return times


def _record_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class PhaseClock:
    """Enters the phases of a step for all that watch: heartbeat, meter, timeline.

    The heartbeat has no end of a phase: it stays in this one until the next is entered.
    """

    _PARTS: ClassVar[dict[str, str]] = {
        "data": "data",
        "compile": "forward",
        "forward-backward": "forward",
        "update": "optimizer",
        "evaluate": "evaluation",
        "save": "checkpoint",
    }

    def __init__(self, progress: Progress, meter: Meter, timeline: Timeline) -> None:
        self._progress = progress
        self._timeline = timeline
        self._metered = {"data": meter.data_wait, "evaluate": meter.excluded, "save": meter.excluded}

    @contextlib.contextmanager
    def __call__(self, name: str, step: int | None = None) -> Iterator[None]:
        """Enters a phase. `step`: the one in progress; None: as before."""
        self._progress.enter(name, step)
        with self._metered.get(name, contextlib.nullcontext)(), self._timeline.within(self._PARTS[name]):
            yield


FOLDER = "profile"
_TOP = 40


class Profiler:
    """Traces the steps of `profile.steps` by torch's profiler, if this rank is to.

        RUN/profile/steps-3-5-rank-0.json.gz   kernels, collectives and calls, for ui.perfetto.dev
        RUN/profile/steps-3-5-rank-0.txt       the top operations

    Traced steps are slower, and their times in the metrics with them. No error here stops a run.
    """

    def __init__(self, config: ProfileConfig, run_dir: Path, rank: int, *, on_cuda: bool) -> None:
        self._steps = config.steps if config.steps is not None and rank in config.ranks else None
        self._folder = run_dir / FOLDER
        self._rank = rank
        self._on_cuda = on_cuda
        self._trace: Any = None
        self._first = 0

    def before_step(self, step: int) -> None:
        """Begins a trace at the first step of the range, or where a run is resumed within it."""
        if self._steps is None or self._trace is not None or not self._steps[0] <= step <= self._steps[1]:
            return
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_cuda else [])]
        self._trace = profile(activities=kinds, record_shapes=True)
        self._first = step
        try:
            self._trace.start()
        except RuntimeError as error:  # another profiler of the process
            log.warning("profile: %s", error)
            self._trace = self._steps = None

    def after_step(self, step: int) -> None:
        """Writes the trace after the last step of the range."""
        if self._trace is not None and self._steps is not None and step >= self._steps[1]:
            self.close(step)

    def close(self, step: int) -> None:
        """Writes the trace, up to `step`. Idempotent."""
        trace = self._trace
        self._trace = self._steps = None
        if trace is None:
            return
        name = f"steps-{self._first}-{step}-rank-{self._rank}"
        path = self._folder / f"{name}.json.gz"
        try:
            trace.stop()
            trace.export_chrome_trace(str(make_dir(self._folder) / path.name))
            by = "self_cuda_time_total" if self._on_cuda else "self_cpu_time_total"
            table = trace.key_averages().table(sort_by=by, row_limit=_TOP, max_name_column_width=60)
            write_file(self._folder / f"{name}.txt", table.encode())
        except (DiskError, OSError, RuntimeError) as error:
            log.warning("profile: %s", error)
        else:
            log.info("profile of steps %d to %d: %s, and a table beside it", self._first, step, path)
