"""One interface of experiment trackers, and the thread that keeps each of them away from a run.

    RunOutput.log  ->  Mirror: a queue  ->  its thread: Tracker.open, log, samples, ..., close
    a store on this machine alone       ->  opened with the first row: seconds of imports
    no row for too long                 ->  an alert from the thread itself: the run has stalled

A thread waits for its store, so that training does not. Each failure of a client is one warning:
the next mode of the tracker is tried (wandb: online, then offline), and without one its rows are
in metrics.jsonl alone. A client that hangs takes no more rows, and delays the end of the run by
the time that `close` is given.

Not the trackers of accelerate: that of MLflow is the one active run of the process, known by the
server's id alone, and always ends as finished; that of TensorBoard shows steps twice after a rewind.

Signals: Slurm sends SIGTERM and SIGUSR1 to every process of a job step. Processes that a client
starts inherit a mask that blocks both, and SIGINT.
"""

import contextlib
import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from pretrain.config.tracking import TrackingConfig
from pretrain.utils.log import redact

logger = logging.getLogger(__name__)

FINISH_TIMEOUT_S = 60.0
_BLOCKED = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}
_MAX_RESTARTS = 3
_MAX_QUEUED_ROWS = 10_000
_PERFORMANCE = {"mfu", "data_wait", "checkpoint_step"}
"""Metrics of the section `perf` besides those in seconds."""


class Identity(NamedTuple):
    """A run as trackers show it: the id of run.json, the same over resumes; name; config."""

    id: str
    name: str
    config: Mapping[str, Any]
    parent: tuple[str, int] | None = None  # folder and step of the run whose weights it began with


class Tracker(Protocol):
    """A store of the metrics of a run; the thread of its mirror calls it, but for `abandon`.

    Each call may block, and may raise anything. Strings in the identity and the facts that it is
    given are redacted. What a store has no place for is left to the run folder: a class that names
    this one as its base inherits methods that do nothing.
    """

    name: ClassVar[str]  # for warnings
    modes: list[str]  # ways to open it, the best first
    opens_late: bool = False  # with the first row, alert or picture: it has no followers before

    def open(self, mode: str, facts: Mapping[str, Any]) -> None:
        """Begins the run in the store, or continues it; `facts` come from `find_facts`."""
        ...

    def instead(self, mode: str) -> str:
        """Returns what a warning says of a mode that failed: where the rows go instead."""
        return "; metrics.jsonl has the rows"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes a row; several may have the same step."""
        ...

    def samples(self, step: int, rows: Sequence[tuple[str, str]]) -> None:
        """Takes the (prompt, text) pairs of a step."""
        return

    def picture(self, step: int, name: str, path: Path) -> None:
        """Takes an image file."""
        return

    def checkpoint(self, step: int, path: Path) -> None:
        """Takes a committed checkpoint."""
        return

    def alert(self, title: str, text: str) -> None:
        """Tells the followers of the run."""
        return

    def hides(self, rollbacks: int) -> bool:
        """Returns whether `rewind` hides rows, so that those after it are sent again.

        Else a step is sent once. `rollbacks`: number of those in run.json: a start that continues
        a run that was killed is none. From any thread.
        """
        return False

    def rewind(self, step: int, rollbacks: int) -> None:
        """Hides what came after `step`. Called where `hides` is true."""
        return

    def reset(self) -> None:
        """Drops a broken connection before the next `open`."""
        return

    def close(self, *, is_failing: bool) -> None:
        """Sends all that is left, and ends the run in the store."""
        ...

    def abandon(self) -> None:
        """Ends what would keep the process from exiting: another call hangs. From any thread."""
        return


def panel_name(metric: str) -> str:
    """Returns the name of a metric in a tracker; its prefix is the section of its panel."""
    if metric == "step":
        return metric
    if metric.startswith("val_"):
        return f"val/{metric.removeprefix('val_')}"
    if metric.startswith("memory_"):
        return f"system/{metric}"
    # A source of a mixture, as in `loss_NAME`, may have any ending.
    is_time = metric.endswith("_s") and not metric.startswith(("loss_", "epochs_"))
    return f"{'perf' if is_time or metric in _PERFORMANCE else 'train'}/{metric}"


def without_secrets(value: Any) -> Any:
    """Returns a copy of nested lists and dicts with every string redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: without_secrets(item) for key, item in value.items()}
    return [without_secrets(item) for item in value] if isinstance(value, list | tuple) else value


class StallWatch:
    """Time between rows. From `least_s` seconds without one on, the run has stalled; 0: never."""

    def __init__(self, least_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._least_s = least_s
        self._clock = clock
        self._longest_s = 0.0
        self._seen_at: float | None = None
        self._is_over = False
        self.last_step = 0

    @property
    def patience_s(self) -> float | None:
        """Longest wait for the next row; None: no limit, after the alert or without alerts."""
        return None if self._is_over or not self._least_s else max(self._least_s, 3 * self._longest_s)

    def see(self, step: int) -> None:
        """Notes a row."""
        now = self._clock()
        if self._seen_at is not None:
            self._longest_s = max(self._longest_s, now - self._seen_at)
        self._seen_at = now
        self._is_over = False
        self.last_step = step

    def give_up(self) -> None:
        """Ends the patience: one alert until the next row."""
        self._is_over = True


class _Row(NamedTuple):
    step: int
    metrics: Mapping[str, float]


class _Extra(NamedTuple):
    """A message besides rows: its name, for the warning, and the call that sends it."""

    action: str
    send: Callable[[], object]


class Mirror:
    """Feeds one tracker from a thread of its own.

    Rows up to `after_step` were sent before the run was resumed: steps never go backwards, unless
    the tracker hides the first ones. `find_facts` is called in the thread, for facts besides the config.
    """

    def __init__(
        self,
        tracker: Tracker,
        config: TrackingConfig,
        after_step: int = -1,
        find_facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._tracker = tracker
        self._has_alerts = config.alerts
        self._watch = StallWatch(config.stall_alert_s if config.alerts else 0.0)
        self._after_step = after_step
        self._find_facts = find_facts
        self._rows: queue.Queue[_Row | _Extra | None] = queue.Queue(_MAX_QUEUED_ROWS)
        self._warned_full = False
        self._is_failing = False
        self._is_closing = threading.Event()
        self._is_given_up = False  # its calls fail, as `abandon` wants them to
        name = f"{tracker.name}-mirror"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands a row to the thread; about 2 us. A full queue drops it."""
        if step > self._after_step:
            self._put(_Row(step, metrics))

    def samples(self, step: int, rows: Sequence[tuple[str, str]]) -> None:
        """Hands over the (prompt, text) pairs of a step."""
        if step > self._after_step:
            self._put(_Extra("log samples", partial(self._tracker.samples, step, rows)))

    def picture(self, step: int, name: str, path: Path) -> None:
        """Hands over the image file of a step, which the thread copies."""
        if step > self._after_step:
            send = partial(self._tracker.picture, step, name, path)
            self._put(_Extra(f"log the picture {path.name}", send))

    def checkpoint(self, step: int, path: Path) -> None:
        """Hands over a committed checkpoint."""
        send = partial(self._tracker.checkpoint, step, path)
        self._put(_Extra(f"log the checkpoint {path.name}", send))

    def alert(self, title: str, text: str) -> None:
        """Sends an alert, unless alerts are off."""
        if self._has_alerts:
            self._put(_Extra("alert", partial(self._tracker.alert, title, redact(text))))

    def rewind(self, step: int, sent: int, rollbacks: int = 0) -> None:
        """Goes back to `step`. Rows up to `sent`, which come again, are hidden or left out."""
        if self._tracker.hides(rollbacks):
            self._after_step = step
            self._put(_Extra("rewind", partial(self._tracker.rewind, step, rollbacks)))
        else:
            self._after_step = max(self._after_step, sent)

    def _put(self, item: _Row | _Extra) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._rows.put_nowait(item)
        except queue.Full:
            if not self._warned_full:
                text = "%s: takes no rows; they go to metrics.jsonl only"
                logger.warning(text, self._tracker.name)
            self._warned_full = True

    def begin_close(self, *, is_failing: bool = False) -> None:
        """Lets the thread end once the queue is empty, without a wait. Idempotent.

        `is_failing`: the run ends by an error, whose message is not to stand below a warning.
        """
        self._is_failing = self._is_failing or is_failing
        self._is_closing.set()
        with contextlib.suppress(queue.Full):  # the thread looks after each item
            self._rows.put_nowait(None)

    def close(self, timeout_s: float = FINISH_TIMEOUT_S, *, is_failing: bool = False) -> None:
        """Ends the run in the store; waits at most `timeout_s` for the queued rows. Idempotent."""
        if not self._thread.is_alive():
            return
        self.begin_close(is_failing=is_failing)
        self._thread.join(timeout_s)
        if self._thread.is_alive() and not self._is_given_up:
            level = logging.DEBUG if self._is_failing else logging.WARNING
            text = "%s: not finished after %.1f s; the run folder has what was not uploaded"
            logger.log(level, text, self._tracker.name, timeout_s)
            self._is_given_up = True
            self._tracker.abandon()

    def _work(self) -> None:
        # By mask, not by SIG_IGN: a thread can set it, and no signal that is meant for the run
        # itself is lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        facts: dict[str, Any] = {}
        waits = self._tracker.opens_late
        is_open, restarts = not waits and self._open(facts), 0
        while (item := self._next(is_open)) is not None:
            if waits:
                waits, is_open = False, self._open(facts)
            if isinstance(item, _Extra):
                if is_open:
                    self._attempt(item.action, item.send)
                continue
            while is_open and not self._attempt("log", partial(self._tracker.log, *item)):
                restarts += 1
                is_open = restarts <= _MAX_RESTARTS and self._reset() and self._open(facts)
        if is_open:
            self._attempt("finish", partial(self._tracker.close, is_failing=self._is_failing))

    def _next(self, is_open: bool) -> _Row | _Extra | None:
        """Waits for the next item; sends an alert when no row comes for too long. None: the end."""
        while True:
            if self._is_closing.is_set() and self._rows.empty():
                return None  # the queue was too full for the None
            try:
                item = self._rows.get(timeout=self._watch.patience_s)
            except queue.Empty:
                last = self._watch.last_step
                text = f"no metrics for {self._watch.patience_s:.0f} s, the last of step {last}"
                self._watch.give_up()
                if is_open:
                    self._attempt("alert", partial(self._tracker.alert, "The run stands still", text))
                continue
            if isinstance(item, _Row):
                self._watch.see(item.step)
            return item

    def _open(self, facts: dict[str, Any]) -> bool:
        """Opens the tracker in the best mode that works; returns whether one does."""
        if not facts:
            find = self._find_facts
            self._attempt("describe the run", lambda: facts.update(without_secrets(find())))
        modes = self._tracker.modes
        while modes:
            mode = modes[0]
            instead = self._tracker.instead(mode)
            if self._attempt(f"start {mode}".rstrip(), partial(self._tracker.open, mode, facts), instead):
                return True
            del modes[0]
            if not modes or not self._reset():
                break
        return False

    def _reset(self) -> bool:
        return self._attempt("restart", self._tracker.reset)

    def _attempt(self, action: str, call: Callable[[], object], instead: str = "") -> bool:
        """Calls into the client; returns whether it worked, with a warning and `instead` if not."""
        try:
            call()
        # The one broad except: clients raise all that their transports do, their errors share no
        # base class, and a mirror must not stop a run. The text is shown: nothing is hidden.
        except Exception as error:
            level = logging.DEBUG if self._is_given_up else logging.WARNING
            reason = f"{type(error).__name__}: {error}"
            logger.log(level, "%s: cannot %s: %s%s", self._tracker.name, action, reason, instead)
            return False
        return True
