"""Time of a step by part: data, forward, backward, optimizer, communication, evaluation, checkpoint, other.

    timeline.enter("forward")    the part before it ends here
    timeline.end_step()          the step ends here
    metrics |= timeline.take()   seconds a step of each part since the last call; they add up to the time that passed

On a CPU parts are cut by the clock. On CUDA, where the host runs ahead, they are cut by events on the stream, read a
step late, so that nothing waits for them: a part lasts until the device has done what it was given in it.

Not here: communication inside the engine. Gradients are reduced under the backward pass, and weights gathered under
the optimizer: what of that is exposed counts there. `communication` is the wait for the exchange of the loop, which
ends when the slowest rank has come; a profile (`profile.steps`) shows every collective by itself.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pretrain.config.tracking import ProfileConfig
from pretrain.errors import DiskError
from pretrain.utils.io import make_dir, write_file

PARTS = ("data", "forward", "backward", "optimizer", "communication", "evaluation", "checkpoint", "other")


class Timeline:
    """Cuts time into parts. Costs about 0.3 us a cut on the host, 3 us with events.

    Args:
        on_cuda: Cut by CUDA events.
        clock: Monotonic seconds, for the host.
    """

    def __init__(self, on_cuda: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = _record_event if on_cuda else clock
        self._on_cuda = on_cuda
        self._part, self._since = "other", self._clock()
        self._cuts: deque[tuple[str, Any, Any]] = deque()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._num_steps = 0

    @property
    def part(self) -> str:
        """The part that runs."""
        return self._part

    def enter(self, part: str) -> None:
        """Ends the part that runs, and begins another, one of PARTS."""
        now = self._clock()
        if self._on_cuda:
            self._cuts.append((self._part, self._since, now))
        else:
            self._seconds[self._part] += now - self._since
        self._part, self._since = part, now

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Counts the body as `part`; then the part that ran before goes on."""
        before = self._part
        self.enter(part)
        yield
        self.enter(before)

    def after_forward(self, *_: object) -> None:
        """A forward hook of the module that is trained: what follows is the backward pass. Evaluation has none."""
        if self._part == "forward":
            self.enter("backward")

    def end_step(self) -> None:
        """Ends a step; what follows until the next part is `other`."""
        self.enter("other")
        self._num_steps += 1

    def take(self) -> dict[str, float]:
        """Returns `data_s`, `forward_s` and so on, a step, of the steps that have ended since the last call.

        Parts that took no time are left out; without a step there is nothing.
        """
        while self._cuts and self._cuts[0][2].query():
            part, start, end = self._cuts.popleft()
            self._seconds[part] += start.elapsed_time(end) / 1e3
        steps, self._num_steps = self._num_steps, 0
        if not steps:
            return {}
        seconds, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return {f"{part}_s": value / steps for part, value in seconds.items() if value}


def _record_event() -> Any:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


# `profile.steps`: a trace of a few steps by torch's profiler, and the operations that took most of
# their time.
#
#   RUN/profile/steps-3-5-rank-0.json.gz   for chrome://tracing or ui.perfetto.dev: kernels, collectives, Python's calls
#   RUN/profile/steps-3-5-rank-0.txt       the top operations
#
# Steps that are traced are slower, and their times in the metrics with them. Nothing that goes
# wrong here stops a run.


log = logging.getLogger(__name__)

FOLDER = "profile"

_TOP = 40


class Profiler:
    """Traces the steps that the config names, if this rank is to.

    Args:
        config: Which.
        run_dir: The run folder.
        rank: This rank.
        on_cuda: Trace CUDA kernels too.
    """

    def __init__(self, config: ProfileConfig, run_dir: Path, rank: int, *, on_cuda: bool) -> None:
        self._steps = config.steps if config.steps is not None and rank in config.ranks else None
        self._folder, self._rank, self._on_cuda = run_dir / FOLDER, rank, on_cuda
        self._trace: Any = None
        self._first = 0

    def before_step(self, step: int) -> None:
        """Begins to trace where `step` is the first that is asked for, or a run is resumed among them."""
        if self._steps is None or self._trace is not None or not self._steps[0] <= step <= self._steps[1]:
            return
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_cuda else [])]
        self._trace, self._first = profile(activities=kinds, record_shapes=True), step
        try:
            self._trace.start()
        except RuntimeError as error:  # another profiler of the process
            log.warning("profile: %s", error)
            self._trace = self._steps = None

    def after_step(self, step: int) -> None:
        """Writes what was traced where `step` is the last one."""
        if self._trace is not None and self._steps is not None and step >= self._steps[1]:
            self.close(step)

    def close(self, step: int) -> None:
        """Writes what was traced, up to `step`. Idempotent."""
        trace, self._trace, self._steps = self._trace, None, None
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
