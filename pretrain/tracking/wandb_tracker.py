"""Weights & Biases: online, or offline in the run folder.

A service process of wandb sends the rows. It ignores SIGUSR1, but quits at SIGINT and SIGTERM, and
installs its handlers over inherited ones. (Ctrl-C does not reach it: it has its own session.) So
its death is expected: the next row starts another one under the same run id.
"""

import contextlib
import importlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, cast
from urllib.parse import urlparse

from pretrain.config.tracking import TrackingConfig
from pretrain.errors import ConfigError, DiskError
from pretrain.tracking.tracker import FINISH_TIMEOUT_S, Identity, Tracker, panel_name, without_secrets
from pretrain.utils.io import make_dir, write_file
from pretrain.utils.jsonl import JsonLines, newest_rows
from pretrain.utils.log import WANDB_HOST, netrc_login, quiet_libraries

logger = logging.getLogger(__name__)

Mode = Literal["online", "offline", "off"]

STEPS = "steps.jsonl"
_INIT_TIMEOUT_S = 30.0


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


def build_wandb(run_dir: Path, config: TrackingConfig, identity: Identity) -> "WandbTracker | None":
    """Builds the tracker; None: WANDB_MODE turns it off."""
    mode = choose_mode(config.wandb)
    return None if mode == "off" else WandbTracker(run_dir, config, identity, mode)


def check_fork(wanted: Literal["auto", "online", "offline", "off"]) -> None:
    """Refuses `tracking.wandb_fork` where wandb cannot fork. Raises: ConfigError."""
    if choose_mode(wanted) != "online":
        why = "its server copies the history, an offline run has none to copy"
        raise ConfigError(
            f"tracking.wandb_fork needs wandb online: {why}",
            fix="set WANDB_API_KEY and tracking.wandb=online, or tracking.wandb_fork=false",
        )


class Point(NamedTuple):
    """A row of `wandb/steps.jsonl`: where a step of ours is in the history of a run of wandb."""

    step: int
    id: str
    history_step: int  # wandb's `_step`, which counts calls of `log`
    rollbacks: int  # those in run.json when the row was sent
    offset: int  # what the x-axis adds to `step`: the step of the run that a fine-tuning began from

    @staticmethod
    def find(run_dir: Path, step: int | None = None) -> "Point | None":
        """Returns the newest point of a run, up to `step`; None: it has none that can be read."""
        with contextlib.suppress(OSError, TypeError):
            points = (Point(**row) for row in newest_rows(run_dir / "wandb" / STEPS, "step"))
            return next((point for point in points if step is None or point.step <= step), None)
        return None


class WandbTracker(Tracker):
    """A run of Weights & Biases, under the id of run.json: one run over all resumes.

    With `tracking.wandb_fork` each rollback begins another, `ID-1`, `ID-2` ..., which has the
    history up to there. `wandb/steps.jsonl` says where that is.
    """

    name: ClassVar[str] = "wandb"

    def __init__(self, run_dir: Path, config: TrackingConfig, identity: Identity, mode: Mode) -> None:
        self._run_dir = run_dir
        self._temporary = run_dir / "wandb-tmp"
        self._config = config
        self._identity = identity
        self.modes = {"online": ["online", "offline"], "offline": ["offline"], "off": []}[mode]
        self.opens_late = mode == "offline"
        self._mode: str = mode
        self._facts: Mapping[str, Any] = {}
        self._run: Any = None
        self._steps: JsonLines | None = None
        last = Point.find(run_dir)
        self._is_new = last is None
        self._point = last or Point(0, identity.id, 0, 0, 0)
        self._rollbacks = self._point.rollbacks

    def instead(self, mode: str) -> str:
        """Returns where a run that cannot be online is tracked."""
        return f"; tracked offline, see {self._run_dir / 'wandb' / 'SYNC.txt'}" if mode == "online" else ""

    def open(self, mode: str, facts: Mapping[str, Any]) -> None:
        """Starts wandb and its service; the facts stand beside the config."""
        self._mode, self._facts = mode, facts
        parent = self._identity.parent
        if self._config.wandb_fork and mode == "online" and self._is_new and parent is not None:
            folder, step = parent
            if (source := Point.find(Path(folder), step)) is not None:
                self._begin(source)
                self._point = self._point._replace(offset=source.offset + step)
                return
            logger.warning("wandb: cannot fork: %s has no row up to step %d in wandb", folder, step)
        self._begin(None)

    def _begin(self, source: Point | None) -> None:
        """Begins the run as a fork of another; None: begins it, or continues it."""
        wandb = _import_wandb(self._temporary)
        quiet_libraries("wandb")
        begun: dict[str, Any] = {"resume": "allow"}
        if source is not None:
            begun = {"fork_from": f"{source.id}?_step={source.history_step}"}
        labels = self._config.model_dump(include={"project", "entity", "group", "job_type", "tags", "notes"})
        labels["name"] = self._config.name or self._identity.name
        # Without git and code: the remote's URL may contain a token, and run.json has the versions.
        settings = wandb.Settings(
            silent=True, console="off", init_timeout=_INIT_TIMEOUT_S, disable_git=True, disable_code=True
        )
        if hasattr(settings, "finish_timeout"):
            settings.finish_timeout = FINISH_TIMEOUT_S
        self._run = wandb.init(
            id=self._point.id,
            config={**self._identity.config, **self._facts},
            dir=str(make_dir(self._run_dir)),
            mode=cast(Literal["online", "offline"], self._mode),
            settings=settings,
            **begun,
            **without_secrets(labels),
        )
        self._is_new = False
        self._point = self._point._replace(history_step=self._run.starting_step)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("val/loss", step_metric="step", summary="min")
        if self._mode == "offline":
            self._write_note()

    def _write_note(self) -> None:
        note = (
            "This run was tracked offline. To upload it, with a key (`wandb login`), from the run folder:\n\n"
            f"    wandb sync wandb/offline-run-*-{self._point.id}\n"
        )
        try:
            write_file(self._run_dir / "wandb" / "SYNC.txt", note.encode())
        except DiskError as error:
            logger.warning("wandb: %s", error)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends a row."""
        self._send(step, {panel_name(name): value for name, value in metrics.items()})

    def _send(self, step: int, values: Mapping[str, Any]) -> None:
        """Sends values of a step, and notes where they are in the history."""
        self._run.log({"step": step + self._point.offset, **values})
        if self._mode == "online":  # the history of an offline run begins anew with each start
            with contextlib.suppress(DiskError):  # without the note, a fork begins earlier
                if self._steps is None:
                    self._steps = JsonLines(make_dir(self._run_dir / "wandb") / STEPS)
                point = self._point._replace(step=step, rollbacks=self._rollbacks)
                self._steps.append(point._asdict())
        self._point = self._point._replace(history_step=self._point.history_step + 1)

    def samples(self, step: int, rows: Sequence[tuple[str, str]]) -> None:
        """Sends the texts, as a table."""
        import wandb

        data = [[step, *row] for row in rows]
        self._send(step, {"samples": wandb.Table(columns=["step", "prompt", "text"], data=data)})

    def picture(self, step: int, name: str, path: Path) -> None:
        """Sends an image."""
        import wandb

        self._send(step, {name: wandb.Image(str(path))})

    def checkpoint(self, step: int, path: Path) -> None:
        """Sends an artifact, as `tracking.artifacts` says."""
        import wandb

        if self._config.artifacts == "none":
            return
        metadata = {"step": step}
        name = f"checkpoint-{self._identity.id}"
        artifact = wandb.Artifact(name, type="checkpoint", metadata=metadata)
        if self._config.artifacts == "files":
            for file in sorted(path.iterdir()):  # a whole folder would write to the terminal
                artifact.add_file(str(file))
        else:
            artifact.add_reference(path.resolve().as_uri(), checksum=False)
        self._run.log_artifact(artifact, aliases=["latest", f"step-{step}"])

    def alert(self, title: str, text: str) -> None:
        """Sends an alert."""
        self._run.alert(title=title, text=text, level="ERROR")

    def hides(self, rollbacks: int) -> bool:
        """Returns whether the run goes back since its last row, and another run is to show it."""
        can_fork = self._config.wandb_fork and self._mode == "online" and not self._is_new
        before, self._rollbacks = self._rollbacks, rollbacks
        return can_fork and rollbacks > before

    def rewind(self, step: int, rollbacks: int) -> None:
        """Ends the run, and begins a fork of it."""
        if self._mode != "online":
            logger.warning("wandb: cannot fork offline: steps after %d are shown twice", step)
            return
        source = Point.find(self._run_dir, step)
        self._run.finish()
        self._point = self._point._replace(id=f"{self._identity.id}-{rollbacks}")
        self._begin(source)

    def reset(self) -> None:
        """Forgets a service that is gone."""
        _forget_service()

    def close(self, *, is_failing: bool) -> None:
        """Sends all rows."""
        self._run.finish()
        if self._steps is not None:
            self._steps.close()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def abandon(self) -> None:
        """Ends a service that hangs: the exit hook of wandb would wait for it without limit."""
        _kill_service()


def _import_wandb(temporary: Path) -> Any:
    """Imports wandb, which makes temporary folders as it is imported: below `temporary`.

    A process that ends at once leaves them: in the folder of the run its next start removes them.
    """
    if sys.modules.get("wandb") is None:
        shutil.rmtree(temporary, ignore_errors=True)
        before, tempfile.tempdir = tempfile.tempdir, str(make_dir(temporary))
        try:
            import wandb  # noqa: F401
        finally:
            tempfile.tempdir = before
    return importlib.import_module("wandb")


def _forget_service() -> None:
    """Drops the connection to a dead service process, so that `init` starts another."""
    import wandb

    # It cleans up, then tells the service to stop. A dead one does not answer, or has an exit code
    # that wandb then wants to end this process with.
    with contextlib.suppress(OSError, SystemExit):
        wandb.teardown()


def _kill_service() -> None:
    """Ends a service process that hangs."""
    import wandb
    from wandb.errors import term
    from wandb.sdk import wandb_setup

    term.termsetup(wandb.Settings(silent=True, show_errors=False), None)  # of the thread, whose service is gone

    connection = wandb_setup.singleton()._connection
    if connection is not None and connection._proc is not None:
        os.kill(connection._proc._process.pid, signal.SIGKILL)
    _forget_service()
