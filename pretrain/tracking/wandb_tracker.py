"""Weights & Biases: online, or offline in the run folder.

A service process of wandb sends the rows. It ignores SIGUSR1, but quits at SIGINT and SIGTERM, and
installs its handlers over inherited ones. (Ctrl-C does not reach it: it has its own session.) So
its death is expected: the next row starts another one under the same run id.
"""

import contextlib
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, cast
from urllib.parse import urlparse

from pretrain.config.tracking import TrackingConfig
from pretrain.errors import DiskError
from pretrain.tracking.tracker import FINISH_TIMEOUT_S, Identity, Tracker, panel_name, without_secrets
from pretrain.utils.io import make_dir, write_file
from pretrain.utils.log import WANDB_HOST, netrc_login, quiet_libraries

logger = logging.getLogger(__name__)

Mode = Literal["online", "offline", "off"]

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


class WandbTracker(Tracker):
    """A run of Weights & Biases, under the id of run.json: one run over all resumes."""

    name: ClassVar[str] = "wandb"

    def __init__(self, run_dir: Path, config: TrackingConfig, identity: Identity, mode: Mode) -> None:
        self._run_dir = run_dir
        self._config = config
        self._identity = identity
        self.modes = {"online": ["online", "offline"], "offline": ["offline"], "off": []}[mode]
        self._run: Any = None

    def instead(self, mode: str) -> str:
        """Returns where a run that cannot be online is tracked."""
        return f"; tracked offline, see {self._run_dir / 'wandb' / 'SYNC.txt'}" if mode == "online" else ""

    def open(self, mode: str, facts: Mapping[str, Any]) -> None:
        """Starts wandb and its service; the facts stand beside the config."""
        import wandb

        quiet_libraries()
        labels = self._config.model_dump(include={"project", "entity", "group", "job_type", "tags", "notes"})
        labels["name"] = self._config.name or self._identity.name
        # Without git and code: the remote's URL may contain a token, and run.json has the versions.
        settings = wandb.Settings(
            silent=True, console="off", init_timeout=_INIT_TIMEOUT_S, disable_git=True, disable_code=True
        )
        if hasattr(settings, "finish_timeout"):
            settings.finish_timeout = FINISH_TIMEOUT_S
        self._run = wandb.init(
            id=self._identity.id,
            config={**self._identity.config, **facts},
            dir=str(make_dir(self._run_dir)),
            mode=cast(Literal["online", "offline"], mode),
            resume="allow",
            settings=settings,
            **without_secrets(labels),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("val/loss", step_metric="step", summary="min")
        if mode == "offline":
            self._write_note()

    def _write_note(self) -> None:
        note = (
            "This run was tracked offline. To upload it, with a key (`wandb login`), from the run folder:\n\n"
            f"    wandb sync wandb/offline-run-*-{self._identity.id}\n"
        )
        try:
            write_file(self._run_dir / "wandb" / "SYNC.txt", note.encode())
        except DiskError as error:
            logger.warning("wandb: %s", error)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends a row."""
        self._run.log({"step": step, **{panel_name(name): value for name, value in metrics.items()}})

    def samples(self, step: int, rows: Sequence[tuple[str, str]]) -> None:
        """Sends the texts, as a table."""
        import wandb

        data = [[step, *row] for row in rows]
        self._run.log({"step": step, "samples": wandb.Table(columns=["step", "prompt", "text"], data=data)})

    def picture(self, step: int, name: str, path: Path) -> None:
        """Sends an image."""
        import wandb

        self._run.log({"step": step, name: wandb.Image(str(path))})

    def checkpoint(self, step: int, path: Path) -> None:
        """Sends an artifact, as `tracking.artifacts` says."""
        import wandb

        if self._config.artifacts == "none":
            return
        metadata = {"step": step}
        artifact = wandb.Artifact(f"checkpoint-{self._identity.id}", type="checkpoint", metadata=metadata)
        if self._config.artifacts == "files":
            for file in sorted(path.iterdir()):  # a whole folder would write to the terminal
                artifact.add_file(str(file))
        else:
            artifact.add_reference(path.resolve().as_uri(), checksum=False)
        self._run.log_artifact(artifact, aliases=["latest", f"step-{step}"])

    def alert(self, title: str, text: str) -> None:
        """Sends an alert."""
        self._run.alert(title=title, text=text, level="ERROR")

    def reset(self) -> None:
        """Forgets a service that is gone."""
        _forget_service()

    def close(self, *, is_failing: bool) -> None:
        """Sends all rows."""
        self._run.finish()

    def abandon(self) -> None:
        """Ends a service that hangs: the exit hook of wandb would wait for it without limit."""
        _kill_service()


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
