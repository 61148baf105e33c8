"""What a run folder tells while a run goes on: its last step, what is committed, whether it saves."""

import json
import time
from contextlib import suppress
from pathlib import Path

from pretrain.checkpoint.layout import list_checkpoints, step_of
from pretrain.errors import ConfigError
from pretrain.run.folder import RunDir

_TAIL_BYTES = 4096


def newest_step(run: RunDir) -> int:
    """Returns the step of the newest committed checkpoint; 0 where there is none."""
    found = list_checkpoints(run.checkpoints)
    return (step_of(found[-1]) or 0) if found else 0


def last_row(run: RunDir) -> tuple[int, int]:
    """Returns step and attempt of the last whole row of the ledger; zeros where there is none."""
    with suppress(OSError), run.audit.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        whole = file.read().rpartition(b"\n")[0]
        if whole:
            row = json.loads(whole.rpartition(b"\n")[2])
            return int(row["step"]), int(row["attempt"])
    return 0, 0


def attempts(run: RunDir) -> list[dict]:
    """Returns the attempts that run.json tells of; none where it is not there yet."""
    try:
        return list(run.read_record()["attempts"])
    except ConfigError:
        return []


class Watch:
    """One attempt, seen from outside.

    Attributes:
        saved: The newest committed step when it began.
        begun: When that was, of the monotonic clock.
        first_step_s: Seconds from there to its first step; None before.
        longest_save_s: Of its saves so far, from the first file to the commit.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._attempts = len(attempts(run))
        self._leftovers = set(self._temporary())
        self._saving_since: float | None = None
        self.saved, self.begun = newest_step(run), time.monotonic()
        self.first_step_s: float | None = None
        self.longest_save_s = 0.0

    def step(self) -> int:
        """Returns the last step that this attempt has done; 0 before its first."""
        step, attempt = last_row(self._run)
        if attempt <= self._attempts:
            return 0
        if self.first_step_s is None:
            self.first_step_s = time.monotonic() - self.begun
        return step

    def has_begun_to_save(self) -> bool:
        """Returns whether a save is under way, or one is done."""
        return self._is_saving() or newest_step(self._run) > self.saved

    def measure(self) -> None:
        """Notes what there is to see now; called often, it finds how long a save takes."""
        self.step()
        now, saving = time.monotonic(), self._is_saving()
        if saving and self._saving_since is None:
            self._saving_since = now
        elif not saving and self._saving_since is not None:
            self.longest_save_s = max(self.longest_save_s, now - self._saving_since)
            self._saving_since = None

    def resumed_from(self) -> int | None:
        """Returns the step that this attempt went on from; None where it did not get so far."""
        found = attempts(self._run)[self._attempts :]
        return int(found[-1]["from_step"]) if found and "from_step" in found[-1] else None

    def _is_saving(self) -> bool:
        return any(path not in self._leftovers for path in self._temporary())

    def _temporary(self) -> list[Path]:
        with suppress(OSError):
            return list(self._run.checkpoints.glob(".tmp-step-*"))
        return []
