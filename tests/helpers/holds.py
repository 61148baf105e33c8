"""Lets the ranks of a run wait where a test wants them, so that a signal or a kill never comes to one that has ended.

hold = Hold(folder, "first", step=40)
process = runs.start("name", HELD, **hold.environment)      from step 40 on, a rank waits before it saves
... a signal, a kill, hold.release() ...                     a rank that is asked to stop lets all ranks go on
"""

import os
from pathlib import Path

from tests.helpers.fork_server import SOURCE_PATH

HELD = "extend=[held]"
"""The item that brings the module into a run."""

MODULE = """
import os
from pathlib import Path

from pretrain.run.heartbeat import Progress
from pretrain.run.stop import StopFlag
from tests.helpers.waiting import poll_pause

HOLD, PHASE, STEP = Path(os.environ["HOLD"]), os.environ["HOLD_PHASE"], int(os.environ["HOLD_STEP"])
ENTER, HANDLE = Progress.enter, StopFlag._handle


def enter(self, phase, step=None):
    ENTER(self, phase, step)
    while phase == PHASE and self.now.step >= STEP and HOLD.exists():
        HOLD.with_suffix(".held").touch()
        poll_pause()


def handle(self, number):
    HANDLE(self, number)
    HOLD.unlink(missing_ok=True)


Progress.enter, StopFlag._handle = enter, handle
"""


class Hold:
    """One place where ranks wait: they enter `phase`, from `step` on.

    Args:
        folder: On the path of modules of the run.
        name: Of the hold, of which there may be several in a folder.
        phase: One of `Progress.enter`; the row of a step is in the ledger when the step comes to `save`.
        step: The first that waits.
    """

    def __init__(self, folder: Path, name: str, phase: str = "save", step: int = 0) -> None:
        (folder / "held.py").write_text(MODULE)
        self._path = folder / f"{name}.hold"
        self._path.with_suffix(".held").unlink(missing_ok=True)
        self._path.touch()
        place = {"HOLD": str(self._path), "HOLD_PHASE": phase, "HOLD_STEP": str(step)}
        self.environment = {
            **place,
            "PYTHONPATH": os.pathsep.join([str(folder), SOURCE_PATH, os.environ.get("PYTHONPATH", "")]),
        }
        """Of the ranks."""

    @property
    def is_reached(self) -> bool:
        """Whether a rank waits, or has waited."""
        return self._path.with_suffix(".held").exists()

    def release(self) -> None:
        """Lets the ranks go on, and wait no more."""
        self._path.unlink(missing_ok=True)
