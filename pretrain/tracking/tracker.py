"""One row of metrics, to everyone who wants it: the console, metrics.jsonl and Weights & Biases.

Not here: the audit ledger, which is a promise, not a report, and must not be best effort (`audit.py`).
"""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain.config.train import TrackingConfig
from pretrain.errors import DataError, DiskError
from pretrain.tracking.console import Console
from pretrain.tracking.jsonl import JsonLines
from pretrain.tracking.wandb_tracker import FINISH_TIMEOUT_S, WandbMirror

logger = logging.getLogger(__name__)


class Tracker:
    """Takes the metrics of a run. On ranks other than 0 it does nothing. It never stops a run.

    Args:
        run_dir: The run folder; `metrics.jsonl` and `wandb/` are in it.
        config: Project and mode of wandb.
        rank: This process's rank.
        total_steps: Steps of the run.
        run_id: Identity of the run, the same over resumes.
        run_name: Shown in wandb.
        run_config: The resolved config, shown in wandb.

    Raises:
        DiskError: metrics.jsonl cannot be opened at all.
    """

    def __init__(
        self,
        run_dir: Path,
        config: TrackingConfig,
        *,
        rank: int,
        total_steps: int,
        run_id: str,
        run_name: str,
        run_config: Mapping[str, Any],
    ) -> None:
        self._active = rank == 0
        if not self._active:
            return
        self._lines: JsonLines | None = JsonLines(run_dir / "metrics.jsonl")
        # Before any rewind: rows up to here are in wandb already, those after a committed step will come once more.
        sent = self._lines.last_step()
        self._console = Console(total_steps)
        self._wandb = WandbMirror(
            run_dir,
            config,
            run_id=run_id,
            run_name=run_name,
            run_config=run_config,
            after_step=-1 if sent is None else sent,
        )

    def log(self, step: int, metrics: Mapping[str, float], *, shown: bool = True) -> None:
        """Takes the row of a step. Steps never go backwards, but after `rewind`.

        Args:
            step: Steps done.
            metrics: Numbers on the host, by name. Those of `console.py` are shown; all are kept. A value that is not
                finite is null in metrics.jsonl, since JSON has no such number.
            shown: On the console too.
        """
        if not self._active:
            return
        if self._lines is not None:
            row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            try:
                self._lines.append({"step": step, **row})
            except DiskError as error:
                logger.warning("metrics are no longer written: %s", error)
                self._lines = None
        if shown:
            self._console.show(step, metrics)
        self._wandb.log(step, metrics)

    def rewind(self, step: int) -> None:
        """Forgets the rows after a committed step, which the run will come to once more."""
        if self._active and self._lines is not None:
            sent = self._lines.last_step()
            if sent is not None:
                self._wandb.resume_after(sent)
            try:
                self._lines.rewind(step)
            except (DiskError, DataError) as error:
                logger.warning("metrics after step %d are kept beside their repetition: %s", step, error)

    def close(self, timeout_s: float = FINISH_TIMEOUT_S) -> None:
        """Finishes the bar, the file and the wandb run. Idempotent.

        Args:
            timeout_s: Longest wait for wandb to take what is on its way. Less is wise before a preemption's SIGKILL.
        """
        if not self._active:
            return
        self._console.close()
        self._wandb.close(timeout_s)
        if self._lines is not None:
            self._lines.close()
