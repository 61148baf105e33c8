"""Output of a run on rank 0 to console, metrics.jsonl and trackers.

Not here: the audit ledger, which must not be best effort (audit.py).
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from pretrain.config.tracking import TrackingConfig
from pretrain.errors import DataError, DiskError, LaunchError, install_fix
from pretrain.kinds.objectives import TARGET_COUNTS
from pretrain.kinds.trackers import TRACKERS
from pretrain.tracking.picture_files import ATTENTION, Pictures
from pretrain.tracking.tracker import FINISH_TIMEOUT_S, Identity, Mirror, Tracker, without_secrets
from pretrain.tracking.wandb_tracker import check_fork
from pretrain.utils.jsonl import JsonLines
from pretrain.utils.status_line import has_terminal, status_line
from pretrain.utils.units import clock_time

logger = logging.getLogger(__name__)


def _bytes(value: float) -> str:
    """Returns a size with three digits and a binary unit: 950M, 1.20G."""
    return f"{value / 2**20:.0f}M" if value < 1000 * 2**20 else f"{value / 2**30:.3g}G"


def _count(value: float) -> str:
    """Returns a number with three digits and a unit: 950, 12.3k, 1.20M."""
    for limit, unit in ((1e3, ""), (1e6, "k"), (1e9, "M")):
        if value < limit:
            scaled = value / limit * 1e3
            return f"{scaled:.0f}{unit}" if not unit or scaled >= 100 else f"{scaled:.3g}{unit}"
    return f"{value / 1e9:.3g}G"


_COLUMNS: dict[str, tuple[str, Callable[[float], str], int]] = {
    "loss": ("loss", "{:.4f}".format, 8),
    "accuracy": ("acc", "{:.1%}".format, 6),
    "val_loss": ("val_loss", "{:.4f}".format, 0),
    "val_bits_per_byte": ("bits/byte", "{:.3f}".format, 0),
    "val_perplexity": ("perplexity", "{:.2f}".format, 0),
    "val_tokens": ("tokens", _count, 0),
    "val_labels": ("labels", _count, 0),
    "val_answers": ("answers", _count, 0),
    "val_pairs": ("pairs", _count, 0),
    "rewards/margins": ("margin", "{:.3f}".format, 7),
    "lr": ("lr", "{:.2e}".format, 8),
    "grad_norm": ("grad", "{:.2f}".format, 7),
    "tokens_per_s": ("tok/s", _count, 6),
    "read_per_s": ("tok/s read", _count, 6),  # where targets are no tokens
    "images_per_s": ("img/s", _count, 6),
    "mfu": ("mfu", "{:.1%}".format, 5),
    "data_wait": ("wait", "{:.1%}".format, 6),
    "memory_bytes": ("mem", _bytes, 5),
    "eta_s": ("eta", clock_time, 7),
}
"""Shown metrics, in order: label, format, width. Rows of no step show all metrics they have."""
_SPEEDS = ("tokens_per_s", "read_per_s", "images_per_s")
_LEAST_WANTED = ("mfu", "lr", "memory_bytes", "data_wait", "grad_norm", *_SPEEDS)
"""Metrics that a progress line leaves out, in order, where the terminal is narrow."""


def format_metrics(metrics: Mapping[str, float], *, aligned: bool) -> str:
    """Returns `loss   3.2145  lr 3.00e-04 ...`; aligned: each value in a column of fixed width."""
    shown = [name for name in _COLUMNS if name in metrics]
    if not metrics.keys() & {"loss", "lr"}:
        shown += [name for name in metrics if name not in _COLUMNS]
    parts = []
    for name in shown:
        label, form, width = _COLUMNS.get(name, (name, "{:.4g}".format, 0))
        value = metrics[name]
        text = form(value) if math.isfinite(value) else str(value)
        parts.append(f"{label} {text:>{width if aligned else 0}}")
    return ("  " if aligned else " ").join(parts)


def fit_metrics(metrics: Mapping[str, float], width: int) -> str:
    """Returns as much of a row as fits `width` characters; the loss is always in it."""
    shown = dict(metrics)
    for name in (*_LEAST_WANTED, "eta_s", None):
        text = format_metrics(shown, aligned=False)
        if len(text) <= width or name is None:
            break
        shown.pop(name, None)
    return text


class Console:
    """Shows rows: behind the bar of the status line where stderr is a terminal, else a line each.

    Rows without a loss (validation) are lines in both cases. Lines go through `logging`, so they
    reach the log file and stay above the bar. A closed terminal stops nothing (`utils/process.py`).
    """

    def __init__(self, total_steps: int, row_every: int) -> None:
        self._total_steps = total_steps
        self._row_every = row_every
        self._has_stepped = False
        self._line = status_line()
        self._has_bar = has_terminal()

    def advance(self, step: int, phase: str = "") -> None:
        """Moves the bar; `phase` is shown in place of the last row, until the next call."""
        self._line.advance(step, self._total_steps)
        if phase:
            self._line.enter(phase)
        elif self._row_every and not (self._has_bar or self._has_stepped) and step % self._row_every:
            # Rows are minutes apart on a slow machine: whoever waits sees that it works, and how fast.
            logger.info("step %d/%d is done; rows follow every %d steps", step, self._total_steps, self._row_every)
            self._has_stepped = True

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a row: with the accuracy of a classifier, and images rather than their patches."""
        of_tokens = not metrics.keys() & set(TARGET_COUNTS[1:])
        hidden = ["accuracy"] if of_tokens else []
        hidden += ["tokens_per_s"] if "images_per_s" in metrics else []
        metrics = {name: value for name, value in metrics.items() if name not in hidden}
        if not of_tokens and "tokens_per_s" in metrics:
            metrics["read_per_s"] = metrics.pop("tokens_per_s")
        if self._has_bar and "loss" in metrics:
            self._line.advance(step, self._total_steps, partial(fit_metrics, metrics))
            return
        width = len(str(self._total_steps))
        logger.info("step %*d/%d  %s", width, step, self._total_steps, format_metrics(metrics, aligned=True))

    def close(self) -> None:
        """Leaves the last state of the bar on the screen. Idempotent."""
        self._line.close()


def check_trackers(config: TrackingConfig) -> list[str]:
    """Returns the trackers whose package a run needs, and refuses what one cannot do, before the run begins.

    Raises:
        LaunchError: A package is missing.
        ConfigError: A fork without wandb online.
    """
    if config.wandb_fork:
        check_fork(config.wandb)
    needed = [key for key, kind in TRACKERS.items() if kind.package and getattr(config, key)]
    for key in needed:
        package = TRACKERS[key].package
        if find_spec(package) is None:
            raise LaunchError(
                f"tracking.{key} needs the package {package}, which is not installed",
                fix=f"remove tracking.{key}, or {install_fix(package)}",
            )
    return needed


def build_trackers(run_dir: Path, config: TrackingConfig, identity: Identity) -> list[Tracker]:
    """Returns the trackers that the config turns on, none of them open."""
    kinds = [kind for key, kind in TRACKERS.items() if getattr(config, key) != kind.off[key]]
    trackers = [resolve_name(kind.build)(run_dir, config, identity) for kind in kinds]
    return [tracker for tracker in trackers if tracker is not None]


class RunOutput:
    """Takes the metrics of a run. On ranks other than 0 it does nothing. It never stops a run.

    `find_facts` is called in the threads of the trackers, for facts besides the config, in which
    secrets are hidden, too. Raises: DiskError, where metrics.jsonl cannot be opened.
    """

    def __init__(
        self,
        run_dir: Path,
        config: TrackingConfig,
        identity: Identity,
        *,
        rank: int,
        total_steps: int,
        find_facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._active = rank == 0
        if not self._active:
            return
        self._lines = JsonLines(run_dir / "metrics.jsonl")
        # Before any rewind: trackers have the rows up to here, and those after a committed step
        # come again.
        sent = self._lines.last_step()
        self._console = Console(total_steps, config.log_every_steps)
        shown = Identity(*without_secrets(identity))
        trackers = build_trackers(run_dir, config, shown)
        after_step = -1 if sent is None else sent
        self._mirrors = [Mirror(tracker, config, after_step, find_facts) for tracker in trackers]
        self._samples = JsonLines(run_dir / "samples.jsonl") if config.samples.prompts else None
        self._pictures = Pictures(run_dir / ATTENTION)

    def log(self, step: int, metrics: Mapping[str, float], *, shown: bool = True) -> None:
        """Takes the row of a step. Steps never go backwards, but after `rewind`.

        A value that is not finite is null in metrics.jsonl, since JSON has no such number.
        """
        if not self._active:
            return
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        _append(self._lines, {"step": step, **row}, "metrics")
        if shown:
            self._console.show(step, metrics)
        for mirror in self._mirrors:
            mirror.log(step, metrics)

    def advance(self, step: int, phase: str = "") -> None:
        """Shows that a step is done, or a phase between two steps."""
        if self._active:
            self._console.advance(step, phase)

    def samples(self, step: int, rows: Sequence[tuple[str, str]]) -> None:
        """Takes the (prompt, text) pairs of a step, for samples.jsonl, the log and trackers."""
        if not self._active or self._samples is None:
            return
        row = {"step": step, "samples": [{"prompt": prompt, "text": text} for prompt, text in rows]}
        _append(self._samples, row, "samples")
        for prompt, text in rows:
            logger.info("sample %r: %r", prompt, text)
        for mirror in self._mirrors:
            mirror.samples(step, rows)

    def attention(self, step: int, png: bytes) -> None:
        """Takes the picture of attention of a step, for `attention/` and the trackers."""
        if not self._active:
            return
        try:
            path = self._pictures.write(step, png)
        except DiskError as error:
            logger.warning("a picture of attention is left out: %s", error)
            return
        for mirror in self._mirrors:
            mirror.picture(step, "attention", path)

    def checkpoint(self, step: int, path: Path) -> None:
        """Takes a committed checkpoint."""
        for mirror in self._mirrors if self._active else ():
            mirror.checkpoint(step, path)

    def alert(self, title: str, text: str) -> None:
        """Sends an alert to the followers of the run; the log has it already."""
        for mirror in self._mirrors if self._active else ():
            mirror.alert(title, text)

    def rewind(self, step: int, rollbacks: int = 0) -> None:
        """Drops the rows after a committed step, which the run will come to once more.

        `rollbacks`: number of those in run.json.
        """
        if not self._active:
            return
        sent = self._lines.last_step()
        for mirror in self._mirrors:
            mirror.rewind(step, -1 if sent is None else sent, rollbacks)
        for lines in filter(None, (self._lines, self._samples)):
            try:
                lines.rewind(step)
            except (DiskError, DataError) as error:
                logger.warning("metrics after step %d are kept beside their repetition: %s", step, error)
        self._pictures.rewind(step)

    def close(self, timeout_s: float = FINISH_TIMEOUT_S, *, is_failing: bool = False) -> None:
        """Finishes the bar, the file and the trackers. Idempotent.

        `timeout_s`: longest wait for all trackers; short before a preemption's SIGKILL.
        `is_failing`: without a word of it.
        """
        if not self._active:
            return
        self._console.close()
        ends_at = time.monotonic() + timeout_s
        for mirror in self._mirrors:
            mirror.begin_close(is_failing=is_failing)
        for mirror in self._mirrors:
            mirror.close(max(0.0, ends_at - time.monotonic()))
        for lines in filter(None, (self._lines, self._samples)):
            with suppress(DiskError):  # the first refusal was a warning
                lines.flush()
            lines.close()


def _append(lines: JsonLines, row: dict[str, Any], what: str) -> None:
    """Writes a row; where the disk refuses it, warns once, and rows wait for room."""
    try:
        lines.append(row)
    except DiskError as error:
        if lines.num_waiting == 1:
            logger.warning("%s; %s wait in memory until it can be written", error, what)
