"""Trackio: a local database (TRACKIO_DIR), or a Space or server that its own variables name.

Runs are continued by their name, which therefore ends with the id. A step is sent once.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pretrain.config.tracking import TrackingConfig
from pretrain.tracking.tracker import Identity, Tracker, panel_name, without_secrets
from pretrain.utils.log import printable, quiet_libraries

logger = logging.getLogger(__name__)


class TrackioTracker(Tracker):
    """Metrics, texts, pictures and alerts; the config and the facts as the run's config."""

    name: ClassVar[str] = "trackio"

    def __init__(self, run_dir: Path, config: TrackingConfig, identity: Identity) -> None:
        self._config = config
        self._identity = identity
        self.modes = [""]
        self._run: Any = None
        self._step = 0

    def open(self, mode: str, facts: Mapping[str, Any]) -> None:
        """Continues the run, or begins it. No hardware monitors: rows have memory and times."""
        import trackio

        quiet_libraries("trackio")
        _silence(trackio)
        name = f"{self._config.name or self._identity.name}-{self._identity.id}"
        labels = without_secrets({"name": name, "group": self._config.group})
        described = {key: getattr(self._config, key) for key in ("job_type", "tags", "notes")}
        self._run = trackio.init(
            self._config.project,
            **labels,
            config={**self._identity.config, **facts, **without_secrets(described)},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends a row."""
        self._step = step
        self._run.log({panel_name(name): value for name, value in metrics.items()}, step=step)

    def samples(self, step: int, rows: Sequence[tuple[str, str]]) -> None:
        """Sends the texts, in Markdown."""
        import trackio

        shown = (f"**{printable(prompt)}**\n\n```\n{text}\n```" for prompt, text in rows)
        self._run.log({"samples": trackio.Markdown("\n\n".join(shown))}, step=step)

    def picture(self, step: int, name: str, path: Path) -> None:
        """Sends an image, of which Trackio keeps a copy."""
        import trackio

        self._run.log({name: trackio.Image(str(path))}, step=step)

    def alert(self, title: str, text: str) -> None:
        """Sends an alert."""
        import trackio

        self._run.alert(title, text, trackio.AlertLevel.ERROR, step=self._step)

    def close(self, *, is_failing: bool) -> None:
        """Sends all rows; Trackio waits for them 30 s."""
        self._run.finish()


def _silence(trackio: Any) -> None:
    """Sends what Trackio prints to our log, for debugging: standard output is the run's."""

    def note(*values: object, **_: object) -> None:
        logger.debug("%s", printable(" ".join(map(str, values))))

    for module in (trackio, trackio.run, trackio.utils, trackio.deploy):
        module.print = note
