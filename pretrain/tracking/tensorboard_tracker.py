"""TensorBoard: event files in `tensorboard/` of the run folder.

A rewind opens another file, which begins with the step from which on TensorBoard hides what the
files before it have: each step is shown once, as it came last.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pretrain.config.tracking import TrackingConfig
from pretrain.tracking.tracker import Identity, Tracker, panel_name
from pretrain.utils.log import quiet_libraries

FOLDER = "tensorboard"


class TensorBoardTracker(Tracker):
    """Scalars, texts and images; written through after each row."""

    name: ClassVar[str] = "tensorboard"

    def __init__(self, run_dir: Path, config: TrackingConfig, identity: Identity) -> None:
        self._folder = run_dir / FOLDER
        self._identity = identity
        self.modes = [""]
        self._step = 0  # the last one that counts
        self._facts: Mapping[str, Any] = {}
        self._writer: Any = None

    def open(self, mode: str, facts: Mapping[str, Any]) -> None:
        """Loads TensorBoard's writer; the first row opens a file."""
        import torch.utils.tensorboard  # noqa: F401

        quiet_libraries("tensorboard")
        self._facts = facts

    def _files(self) -> Any:
        """Returns the writer of the present file, which begins with config and facts."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._step + 1)
            for tag, values in (("config", self._identity.config), ("facts", self._facts)):
                text = json.dumps(values, indent=2, default=str)
                self._writer.add_text(tag, f"```\n{text}\n```", self._step)
        return self._writer

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes a row, one scalar a metric."""
        for name, value in metrics.items():
            self._files().add_scalar(panel_name(name), value, step)
        self._files().flush()
        self._step = step

    def samples(self, step: int, rows: Sequence[tuple[str, str]]) -> None:
        """Writes the texts, as one in Markdown."""
        shown = (f"{json.dumps(prompt)}\n\n```\n{text}\n```" for prompt, text in rows)
        self._files().add_text("samples", "\n\n".join(shown), step)

    def picture(self, step: int, name: str, path: Path) -> None:
        """Writes an image."""
        import numpy as np
        from PIL import Image

        with Image.open(path) as image:
            pixels_HWC = np.asarray(image.convert("RGB"))
        self._files().add_image(name, pixels_HWC, step, dataformats="HWC")

    def alert(self, title: str, text: str) -> None:
        """Writes an alert beside the texts."""
        self._files().add_text("alerts", f"**{title}**: {text}", self._step)

    def hides(self, rollbacks: int) -> bool:
        """Returns True: rows come as they did last."""
        return True

    def rewind(self, step: int, rollbacks: int) -> None:
        """Ends the present file; what the next one begins with hides the steps after `step`."""
        self.close(is_failing=False)
        self._step = step

    def close(self, *, is_failing: bool) -> None:
        """Ends the file."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def reset(self) -> None:
        """Begins another file, after a write that failed."""
        self._writer = None
