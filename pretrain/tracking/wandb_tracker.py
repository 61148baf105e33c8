"""Weights & Biases as a best-effort mirror of metrics.jsonl, which never delays a step.

    log(step, metrics)          ->  a queue  ->  a separate thread: import wandb, init, log, finish
    samples, picture, ...       ->  the same queue, in order; a failure is one warning
    no row for too long         ->  an alert from the thread itself: the run has stalled

The thread waits for the network, so that training does not. Each failure is one warning and a step
down: online becomes offline, offline becomes off.

Signals: Slurm sends SIGTERM and SIGUSR1 to every process of a job step. wandb's service process
ignores SIGUSR1, but quits at SIGINT and SIGTERM, and installs its handlers over inherited ones.
(Ctrl-C does not reach it: it has its own session.) So its death is expected: the next row starts
another one under the same run id. Its children inherit a mask that blocks the three signals.
"""

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlparse

from pretrain.config.tracking import TrackingConfig
from pretrain.errors import DiskError
from pretrain.utils.io import make_dir, write_file
from pretrain.utils.log import WANDB_HOST, netrc_login, quiet_libraries, redact

logger = logging.getLogger(__name__)

Mode = Literal["online", "offline", "off"]

_BLOCKED = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}
_INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 60.0
_MAX_RESTARTS = 3
_MAX_QUEUED_ROWS = 10_000
_PERFORMANCE = {"mfu", "data_wait", "checkpoint_step"}
"""Metrics of the section `perf` besides those in seconds."""


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


def choose_mode(wanted: Literal["auto", "online", "offline", "off"]) -> Mode:
    """Returns the mode to try first: the wanted one, as far as there is a key.

    `auto` follows WANDB_MODE where it is set, then is online with WANDB_API_KEY or an entry in
    netrc for the server (WANDB_BASE_URL, or the public one), and offline without. `online` without
    a key is offline too, with a warning: wandb would stop to ask for one.
    """
    if wanted in ("offline", "off"):
        return wanted
    asked = os.environ.get("WANDB_MODE", "") if wanted == "auto" else "online"
    if asked == "disabled":
        return "off"
    host = urlparse(os.environ.get("WANDB_BASE_URL", "")).hostname or WANDB_HOST
    if os.environ.get("WANDB_API_KEY") or netrc_login(host):
        return "offline" if asked == "offline" else "online"
    if asked == "online":
        logger.warning("wandb: online, but no WANDB_API_KEY and no netrc entry for %s; tracking offline", host)
    return "offline"


def _panel_name(metric: str) -> str:
    """Returns the name of a metric in wandb; its prefix is the section of its panel."""
    if metric == "step":
        return metric
    if metric.startswith("val_"):
        return f"val/{metric.removeprefix('val_')}"
    if metric.startswith("memory_"):
        return f"system/{metric}"
    # A source of a mixture, as in `loss_NAME`, may have any ending.
    is_time = metric.endswith("_s") and not metric.startswith(("loss_", "epochs_"))
    return f"{'perf' if is_time or metric in _PERFORMANCE else 'train'}/{metric}"


def _without_secrets(value: Any) -> Any:
    """Returns a copy of nested lists and dicts with every string redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: _without_secrets(item) for key, item in value.items()}
    return [_without_secrets(item) for item in value] if isinstance(value, list | tuple) else value


class _Extra(NamedTuple):
    """A message besides rows: its name, for the warning, and the call that sends it."""

    action: str
    send: Callable[[Any], object]


class WandbMirror:
    """Mirrors rows to wandb from a thread.

    `identity` has `id`, the same over resumes, so that wandb shows one run; `name`; and `config`,
    in which secrets are hidden. Rows up to `after_step` were sent before the run was resumed: steps
    never go backwards. `find_facts` is called in the thread, for facts besides the config.
    """

    def __init__(
        self,
        run_dir: Path,
        config: TrackingConfig,
        identity: Mapping[str, Any],
        after_step: int = -1,
        find_facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._run_dir = run_dir
        self._config = config
        self._after_step = after_step
        self._identity = _without_secrets(identity)
        self._mode = choose_mode(config.wandb)
        self._find_facts = find_facts
        self._rows: queue.Queue[dict[str, float] | _Extra | None] = queue.Queue(_MAX_QUEUED_ROWS)
        self._warned_full = False
        self._is_given_up = False  # its service is killed, and calls of the thread fail
        self._thread = threading.Thread(target=self._work, name="wandb-mirror", daemon=True)
        if self._mode != "off":
            self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands a row to the thread; about 2 us. A full queue drops it."""
        if step > self._after_step:
            self._put({"step": step, **metrics})

    def samples(self, step: int, rows: Sequence[tuple[str, str]]) -> None:
        """Hands over the (prompt, text) pairs of a step, as a table."""

        def send(run: Any) -> None:
            import wandb

            data = [[step, *row] for row in rows]
            table = wandb.Table(columns=["step", "prompt", "text"], data=data)
            run.log({"step": step, "samples": table})

        if step > self._after_step:
            self._put(_Extra("log samples", send))

    def picture(self, step: int, name: str, path: Path) -> None:
        """Hands over the image file of a step, which the thread copies."""

        def send(run: Any) -> None:
            import wandb

            run.log({"step": step, name: wandb.Image(str(path))})

        if step > self._after_step:
            self._put(_Extra(f"log the picture {path.name}", send))

    def checkpoint(self, step: int, path: Path) -> None:
        """Hands over a committed checkpoint, as `tracking.artifacts` says."""
        how = self._config.artifacts
        name = f"checkpoint-{self._identity['id']}"

        def send(run: Any) -> None:
            import wandb

            artifact = wandb.Artifact(name, type="checkpoint", metadata={"step": step})
            if how == "files":
                for file in sorted(path.iterdir()):  # a whole folder would write to the terminal
                    artifact.add_file(str(file))
            else:
                artifact.add_reference(path.resolve().as_uri(), checksum=False)
            run.log_artifact(artifact, aliases=["latest", f"step-{step}"])

        if how != "none":
            self._put(_Extra(f"log the checkpoint {path.name}", send))

    def alert(self, title: str, text: str) -> None:
        """Sends an alert, unless alerts are off."""
        if self._config.alerts:
            self._put(_Extra("alert", partial(_alert, title=title, text=text)))

    def _put(self, item: dict[str, float] | _Extra) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._rows.put_nowait(item)
        except queue.Full:
            if not self._warned_full:
                logger.warning("wandb: takes no rows; they go to metrics.jsonl only")
            self._warned_full = True

    def resume_after(self, step: int) -> None:
        """Sends no row up to `step` again: the run went back."""
        self._after_step = max(self._after_step, step)

    def close(self, timeout_s: float = FINISH_TIMEOUT_S, *, is_failing: bool = False) -> None:
        """Finishes the run; waits at most `timeout_s` for the queued rows. Idempotent.

        `is_failing`: the run ends by an error, whose message is not to stand below a warning of wandb.
        """
        if not self._thread.is_alive():
            return
        with contextlib.suppress(queue.Full):
            self._rows.put(None, timeout=timeout_s / 2)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            level = logging.DEBUG if is_failing else logging.WARNING
            logger.log(level, "wandb: not finished after %.1f s; the run folder has what was not uploaded", timeout_s)
            self._is_given_up = True
            _kill_service()

    def _work(self) -> None:
        # By mask, not by SIG_IGN: a thread can set it, and no signal that is meant for the run
        # itself is lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        run = self._start()
        restarts, watch = 0, StallWatch(self._config.stall_alert_s if self._config.alerts else 0.0)
        while (item := self._next(run, watch)) is not None:
            if isinstance(item, _Extra):
                if run is not None:
                    self._attempt(item.action, partial(item.send, run))
                continue
            row = {_panel_name(name): value for name, value in item.items()}
            while run is not None and not self._attempt("log", partial(run.log, row)):
                restarts += 1
                run = self._restart() if restarts <= _MAX_RESTARTS else None
        if run is not None:
            self._attempt("finish", run.finish)

    def _next(self, run: Any | None, watch: StallWatch) -> dict[str, float] | _Extra | None:
        """Waits for the next item; sends an alert when no row comes for too long."""
        while True:
            try:
                item = self._rows.get(timeout=watch.patience_s)
            except queue.Empty:
                text = f"no metrics for {watch.patience_s:.0f} s, the last of step {watch.last_step}"
                watch.give_up()
                if run is not None:
                    self._attempt("alert", partial(_alert, run, title="The run stands still", text=text))
                continue
            if isinstance(item, dict):
                watch.see(int(item["step"]))
            return item

    def _start(self) -> Any | None:
        """Starts wandb in the best mode that works; None when none does."""
        runs: list[Any] = []
        if self._mode == "online":
            instead = f"; tracked offline, see {self._run_dir / 'wandb' / 'SYNC.txt'}"
            if not self._attempt("start online", lambda: runs.append(self._init("online")), instead):
                self._mode = "offline"
                return self._restart()
        if self._mode == "offline":
            self._attempt("start offline", lambda: runs.append(self._init("offline")))
        return runs[0] if runs else None

    def _restart(self) -> Any | None:
        return self._start() if self._attempt("restart", _forget_service) else None

    def _attempt(self, action: str, call: Callable[[], object], instead: str = "") -> bool:
        """Calls into wandb; returns whether it worked, with a warning and `instead` if not."""
        try:
            call()
        # The one broad except: wandb raises all that its transport does, its errors share no base
        # class, and a mirror must not stop a run. The text is shown, so that nothing is hidden.
        except Exception as error:
            level = logging.DEBUG if self._is_given_up else logging.WARNING
            reason = f"{type(error).__name__}: {error}"
            logger.log(level, "wandb: cannot %s: %s%s", action, reason, instead)
            return False
        return True

    def _init(self, mode: Literal["online", "offline"]) -> Any:
        import wandb

        quiet_libraries()
        facts: dict[str, Any] = {}
        self._attempt("describe the run", lambda: facts.update(_without_secrets(self._find_facts())))
        labels = self._config.model_dump(include={"project", "entity", "group", "job_type", "tags", "notes"})
        name = self._config.name or self._identity["name"]
        identity = {**self._identity, **_without_secrets({**labels, "name": name})}
        identity["config"] = {**self._identity["config"], **facts}
        # Without git and code: the remote's URL may contain a token, and run.json has the versions.
        settings = wandb.Settings(
            silent=True, console="off", init_timeout=_INIT_TIMEOUT_S, disable_git=True, disable_code=True
        )
        if hasattr(settings, "finish_timeout"):
            settings.finish_timeout = FINISH_TIMEOUT_S
        place = str(make_dir(self._run_dir))
        run = wandb.init(**identity, dir=place, mode=mode, resume="allow", settings=settings)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        run.define_metric("val/loss", step_metric="step", summary="min")
        if mode == "offline":
            note = (
                "This run was tracked offline. To upload it, with a key (`wandb login`), from the run folder:\n\n"
                f"    wandb sync wandb/offline-run-*-{self._identity['id']}\n"
            )
            try:
                write_file(self._run_dir / "wandb" / "SYNC.txt", note.encode())
            except DiskError as error:
                logger.warning("wandb: %s", error)
        return run


def _alert(run: Any, *, title: str, text: str) -> None:
    run.alert(title=title, text=redact(text), level="ERROR")


def _forget_service() -> None:
    """Drops the connection to a dead service process, so that `init` starts another."""
    import wandb

    # It cleans up, then tells the service to stop. A dead one does not answer, or has an exit code
    # that wandb then wants to end this process with.
    with contextlib.suppress(OSError, SystemExit):
        wandb.teardown()


def _kill_service() -> None:
    """Ends a service process that hangs: wandb's exit hook would wait for it without limit."""
    import wandb
    from wandb.errors import term
    from wandb.sdk import wandb_setup

    term.termsetup(wandb.Settings(silent=True, show_errors=False), None)  # of the thread, whose service is gone

    connection = wandb_setup.singleton()._connection
    if connection is not None and connection._proc is not None:
        os.kill(connection._proc._process.pid, signal.SIGKILL)
    _forget_service()
