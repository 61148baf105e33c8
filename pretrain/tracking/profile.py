"""`profile.steps`: a trace of a few steps by torch's profiler, and the operations that took most of their time.

    RUN/profile/steps-3-5-rank-0.json.gz   for chrome://tracing or ui.perfetto.dev: kernels, collectives, Python's calls
    RUN/profile/steps-3-5-rank-0.txt       the top operations

Steps that are traced are slower, and their times in the metrics with them. Nothing that goes wrong here stops a run.
"""

import logging
from pathlib import Path
from typing import Any

from pretrain.config.tracking import ProfileConfig
from pretrain.errors import DiskError
from pretrain.utils.io import make_dir, write_file

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
