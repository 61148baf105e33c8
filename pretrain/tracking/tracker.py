"""One row of metrics, to everyone who wants it: the console, metrics.jsonl and Weights & Biases.

Texts, pictures and alerts too.

Not here: the audit ledger, which is a promise, not a report, and must not be best effort (`audit.py`).
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pretrain.config.tracking import TrackingConfig
from pretrain.errors import DataError, DiskError
from pretrain.tracking.console import Console
from pretrain.tracking.pictures import ATTENTION, Pictures
from pretrain.tracking.wandb_tracker import FINISH_TIMEOUT_S, WandbMirror
from pretrain.utils.jsonl import JsonLines

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
        find_facts: Called in another thread: what wandb shows besides.

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
        find_facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._active = rank == 0
        if not self._active:
            return
        self._lines = JsonLines(run_dir / "metrics.jsonl")
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
            find_facts=find_facts,
        )
        self._samples = JsonLines(run_dir / "samples.jsonl") if config.samples.prompts else None
        self._pictures = Pictures(run_dir / ATTENTION)

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
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        _append(self._lines, {"step": step, **row}, "metrics")
        if shown:
            self._console.show(step, metrics)
        self._wandb.log(step, metrics)

    def samples(self, step: int, rows: Sequence[tuple[str, str]]) -> None:
        """Takes what was generated at a step: (prompt, text) each, for samples.jsonl, the log and a table in wandb."""
        if not self._active or self._samples is None:
            return
        row = {"step": step, "samples": [{"prompt": prompt, "text": text} for prompt, text in rows]}
        _append(self._samples, row, "samples")
        for prompt, text in rows:
            logger.info("sample %r: %r", prompt, text)
        self._wandb.samples(step, rows)

    def attention(self, step: int, png: bytes) -> None:
        """Takes the picture of attention of a step, for the run folder's `attention/` and as an image in wandb."""
        if not self._active:
            return
        try:
            path = self._pictures.write(step, png)
        except DiskError as error:
            logger.warning("a picture of attention is left out: %s", error)
            return
        self._wandb.picture(step, "attention", path)

    def checkpoint(self, step: int, path: Path) -> None:
        """Tells of a checkpoint that was committed."""
        if self._active:
            self._wandb.checkpoint(step, path)

    def alert(self, title: str, text: str) -> None:
        """Sends an alert to whoever follows the run. The log has said it already."""
        if self._active:
            self._wandb.alert(title, text)

    def rewind(self, step: int) -> None:
        """Forgets the rows after a committed step, which the run will come to once more."""
        if self._active:
            sent = self._lines.last_step()
            if sent is not None:
                self._wandb.resume_after(sent)
            for lines in (self._lines, self._samples):
                try:
                    if lines is not None:
                        lines.rewind(step)
                except (DiskError, DataError) as error:
                    logger.warning("metrics after step %d are kept beside their repetition: %s", step, error)
            self._pictures.rewind(step)

    def close(self, timeout_s: float = FINISH_TIMEOUT_S) -> None:
        """Finishes the bar, the file and the wandb run. Idempotent.

        Args:
            timeout_s: Longest wait for wandb to take what is on its way. Less is wise before a preemption's SIGKILL.
        """
        if not self._active:
            return
        self._console.close()
        self._wandb.close(timeout_s)
        for lines in (self._lines, self._samples):
            if lines is not None:
                with suppress(DiskError):  # said when it began
                    lines.flush()
                lines.close()


def _append(lines: JsonLines, row: dict[str, Any], what: str) -> None:
    """Writes a row; where the disk refuses, that is said once, and rows wait until it does not."""
    try:
        lines.append(row)
    except DiskError as error:
        if lines.num_waiting == 1:
            logger.warning("%s; %s wait in memory until it can be written", error, what)
