"""Weights & Biases as a mirror of metrics.jsonl: best effort, and never in the way of a step.

    log(step, metrics)  ->  a queue  ->  a thread of its own: import wandb, init, log, finish

The thread waits for the network, so that training does not. What can go wrong there ends in one warning, and in the
next best thing: online becomes offline, offline becomes nothing.

Not here: metrics.jsonl, which has every row whatever happens to the mirror.

Signals. Slurm sends SIGTERM and SIGUSR1 to every process of a step. wandb's service process ignores SIGUSR1, but takes
SIGINT and SIGTERM as orders to quit at once, and installs its handlers over any disposition that it inherits. (Ctrl-C
does not reach it: it has a session of its own.) So its death is expected: the next row finds it dead, starts another,
and goes on under the same run id. Its own children inherit a mask that blocks the three signals.
"""

import contextlib
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from pretrain.config.train import TrackingConfig
from pretrain.errors import DiskError
from pretrain.io import make_dir, write_file
from pretrain.log import WANDB_HOST, netrc_password, quiet_libraries, redact

logger = logging.getLogger(__name__)

Mode = Literal["online", "offline", "off"]

_BLOCKED = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}
_INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 60.0
_MAX_RESTARTS = 3
_MAX_QUEUED_ROWS = 10_000


def choose_mode(wanted: Literal["auto", "online", "offline", "off"]) -> Mode:
    """Returns the mode to try first: what is wanted, as far as there is a key.

    `auto` follows WANDB_MODE where it is set, then is online with WANDB_API_KEY or an entry in netrc for the server
    (WANDB_BASE_URL, or the public one), and offline without. `online` without a key is offline too, with a warning:
    wandb would stop to ask for one.
    """
    if wanted in ("offline", "off"):
        return wanted
    asked = os.environ.get("WANDB_MODE", "") if wanted == "auto" else "online"
    if asked == "disabled":
        return "off"
    host = urlparse(os.environ.get("WANDB_BASE_URL", "")).hostname or WANDB_HOST
    if os.environ.get("WANDB_API_KEY") or netrc_password(host):
        return "offline" if asked == "offline" else "online"
    if asked == "online":
        logger.warning("wandb: online, but no WANDB_API_KEY and no netrc entry for %s; tracking offline", host)
    return "offline"


def _without_secrets(value: Any) -> Any:
    """Returns a copy of nested lists and dicts with every string redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: _without_secrets(item) for key, item in value.items()}
    return [_without_secrets(item) for item in value] if isinstance(value, list | tuple) else value


class WandbMirror:
    """Mirrors rows to wandb from a thread.

    Args:
        run_dir: The run folder; wandb writes under its `wandb/`.
        config: Project, entity and mode.
        run_id: Stays the same over resumes, so that wandb shows one run.
        run_name: What wandb shows.
        run_config: The resolved config, shown with the run; secrets in it are hidden.
        after_step: Rows up to this step were sent before the run was resumed; they are not sent again, so that steps
            never go backwards. -1: none.
    """

    def __init__(
        self,
        run_dir: Path,
        config: TrackingConfig,
        *,
        run_id: str,
        run_name: str,
        run_config: Mapping[str, Any],
        after_step: int = -1,
    ) -> None:
        self._run_dir, self._config, self._after_step = run_dir, config, after_step
        self._identity = {"id": run_id, "name": run_name, "config": _without_secrets(run_config)}
        self._mode = choose_mode(config.wandb)
        self._rows: queue.Queue[dict[str, float] | None] = queue.Queue(_MAX_QUEUED_ROWS)
        self._warned_full = False
        self._thread = threading.Thread(target=self._work, name="wandb-mirror", daemon=True)
        if self._mode != "off":
            self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands a row to the thread; about 2 us. A queue full of rows that wandb does not take drops it."""
        if step <= self._after_step or not self._thread.is_alive():
            return
        try:
            self._rows.put_nowait({"step": step, **metrics})
        except queue.Full:
            if not self._warned_full:
                logger.warning("wandb: takes no rows; they go to metrics.jsonl only")
            self._warned_full = True

    def resume_after(self, step: int) -> None:
        """Sends no row up to `step` from now on: those were sent, and come once more because the run went back."""
        self._after_step = max(self._after_step, step)

    def close(self, timeout_s: float = FINISH_TIMEOUT_S) -> None:
        """Finishes the run; waits at most `timeout_s` for the rows that are on their way. Idempotent."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(queue.Full):
            self._rows.put(None, timeout=timeout_s / 2)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("wandb: not finished after %.1f s; the run folder has what was not uploaded", timeout_s)
            _kill_service()

    def _work(self) -> None:
        # By mask, not by SIG_IGN: a thread can set it, and no signal that is meant for the run itself is lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        run = self._start()
        restarts = 0
        while (row := self._rows.get()) is not None:
            while run is not None and not self._attempt("log", partial(run.log, row)):
                restarts += 1
                run = self._restart() if restarts <= _MAX_RESTARTS else None
        if run is not None:
            self._attempt("finish", run.finish)

    def _start(self) -> Any | None:
        """Starts wandb in the best mode that works; None when none does."""
        runs: list[Any] = []
        if self._mode == "online" and not self._attempt("start online", lambda: runs.append(self._init("online"))):
            self._mode = "offline"
            return self._restart()
        if self._mode == "offline":
            self._attempt("start offline", lambda: runs.append(self._init("offline")))
        return runs[0] if runs else None

    def _restart(self) -> Any | None:
        return self._start() if self._attempt("restart", _forget_service) else None

    def _attempt(self, action: str, call: Callable[[], object]) -> bool:
        """Calls into wandb; returns whether it worked, with a warning if not."""
        try:
            call()
        # The one broad except: wandb raises whatever its transport does, its errors share no base class, and a mirror
        # must not stop a run. The text is shown, so that nothing is hidden.
        except Exception as error:
            logger.warning("wandb: cannot %s: %s: %s", action, type(error).__name__, error)
            return False
        return True

    def _init(self, mode: Literal["online", "offline"]) -> Any:
        import wandb

        quiet_libraries()
        settings = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=_INIT_TIMEOUT_S,
            # The remote's URL may hold a token; run.json has the versions.
            disable_git=True,
            disable_code=True,
        )
        if hasattr(settings, "finish_timeout"):
            settings.finish_timeout = FINISH_TIMEOUT_S
        run = wandb.init(
            **self._identity,
            project=self._config.project,
            entity=self._config.entity,
            dir=str(make_dir(self._run_dir)),
            mode=mode,
            resume="allow",
            settings=settings,
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        if mode == "offline":
            self._write_sync_note()
        return run

    def _write_sync_note(self) -> None:
        note = (
            "This run was tracked offline. To upload it, with a key (`wandb login`), from the run folder:\n\n"
            f"    wandb sync wandb/offline-run-*-{self._identity['id']}\n"
        )
        try:
            write_file(self._run_dir / "wandb" / "SYNC.txt", note.encode())
        except DiskError as error:
            logger.warning("wandb: %s", error)


def _forget_service() -> None:
    """Drops a connection to a service process that died, if there is one, so that `init` starts another."""
    import wandb

    # It cleans up, then tells the service to stop. A dead one does not answer, or has an exit code that wandb then
    # wants to end this process with.
    with contextlib.suppress(OSError, SystemExit):
        wandb.teardown()


def _kill_service() -> None:
    """Ends a service process that hangs: wandb's exit hook would wait for it without limit."""
    from wandb.sdk import wandb_setup

    connection = wandb_setup.singleton()._connection
    if connection is not None and connection._proc is not None:
        os.kill(connection._proc._process.pid, signal.SIGKILL)
    _forget_service()
