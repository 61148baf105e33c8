"""audit.jsonl: the ledger that proves the data and losses of a run, one row a step.

    {"step": 7, "tokens": 65536, "digest": "9f0...", "loss": "0x1p+1", "grad_norm": null,
    "attempt": 1}

A run of `model.multi_token` also has "multi_token_loss", the mean over its modules and targets.
A row of images also has "pixels", a digest of what the model read, after augmentation.
Floats are written as `float.hex()`: two runs are the same if and only if their rows are. Rows up to
a committed step are durable before the commit (`sync`), those after it are cut off on resume
(`rewind`), so that a ledger has every step exactly once, however often the run was killed.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from pretrain.errors import DataError, DiskError
from pretrain.utils.jsonl import JsonLines, read_rows

log = logging.getLogger(__name__)

COMPARED_FIELDS = ("tokens", "digest", "pixels", "loss", "multi_token_loss", "grad_norm")
"""Fields that are equal in two runs of the same config and topology; `attempt` counts restarts."""


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One step."""

    step: int  # number of the step, from 1: how many are done with it
    tokens: int  # target tokens of its global batch
    digest: str  # 16 hex digits over the sample ids of the global batch, in order
    loss: str  # mean over its tokens, `float.hex()`
    # Global norm before clipping, `float.hex()`; None when the step was skipped.
    grad_norm: str | None
    attempt: int  # which start of the run did it, from 1
    pixels: str | None = None  # 16 hex digits over the images of the global batch; None: text
    multi_token_loss: str | None = None  # as `loss`, of `model.multi_token`; None: it is 0


@dataclass(frozen=True, slots=True)
class AuditDifference:
    """First difference of two ledgers. A side without a row: field `step`, value None."""

    step: int
    field: str
    left: str | int | None
    right: str | int | None

    def __str__(self) -> str:
        return f"step {self.step}: {self.field} is {self.left} in the first ledger, {self.right} in the second"


class AuditLedger:
    """The ledger of a run in progress; rank 0 owns it.

    A row that the disk has no room for waits in memory: a full disk is no reason to stop training.
    It is written before the next row, and by `sync`, so that no step is committed without its row.
    `fence` is called before each row, and raises where another attempt owns the run by now.
    """

    def __init__(self, path: Path, fence: Callable[[], None] | None = None) -> None:
        self._lines = JsonLines(path)
        self._fence = fence
        self._lock = threading.Lock()  # rows come from the loop, `sync` from the thread that saves

    def append(
        self,
        *,
        step: int,
        tokens: int,
        digest: str,
        loss: float,
        grad_norm: float | None,
        attempt: int,
        pixels: str | None = None,
        multi_token_loss: float | None = None,
    ) -> None:
        """Adds the row of a step; see AuditRow. `grad_norm` is None when the step was skipped."""
        norm = None if grad_norm is None else grad_norm.hex()
        row = {"step": step, "tokens": tokens, "digest": digest, "loss": loss.hex(), "grad_norm": norm}
        further = {} if pixels is None else {"pixels": pixels}
        if multi_token_loss is not None:
            further["multi_token_loss"] = multi_token_loss.hex()
        with self._lock:
            self._lines.add(row | {"attempt": attempt} | further)
            try:
                self._write()
            except DiskError as error:
                if self._lines.num_waiting == 1:
                    log.warning("%s; rows of the ledger wait in memory until it can be written", error)

    @property
    def has_waiting(self) -> bool:
        """Whether rows wait in memory, which end with this process."""
        return self._lines.num_waiting > 0

    def _write(self) -> None:
        if self._lines.num_waiting and self._fence is not None:
            self._fence()
        self._lines.flush()

    def sync(self) -> None:
        """Makes the rows so far durable, before a commit. Any thread may. Raises: DiskError."""
        with self._lock:
            self._write()
        self._lines.sync()

    def rewind(self, step: int) -> None:
        """Cuts off the rows after a committed step. Raises: DataError, DiskError."""
        with self._lock:
            self._lines.rewind(step)

    def close(self) -> None:
        """Closes the file. Idempotent. Waiting rows are of steps that were not committed."""
        self._lines.close()


def read_audit(path: Path) -> list[AuditRow]:
    """Reads a ledger; a torn last line is left out. Raises: DataError, where a line is damaged."""
    try:
        return [AuditRow(**row) for row in read_rows(path)]
    except TypeError as error:
        raise DataError(f"a row is not of an audit ledger: {error}", where=str(path), fix="restore the file") from None


def compare(left: Path, right: Path, fields: Sequence[str] = COMPARED_FIELDS) -> AuditDifference | None:
    """Returns the first difference of two ledgers; None without any. Raises: DataError.

    `fields` are compared besides `step`; across topologies, where sums round differently, use
    `("tokens", "digest")`.
    """
    for one, other in zip_longest(read_audit(left), read_audit(right)):
        if one is None or other is None or one.step != other.step:
            steps = [row.step if row else None for row in (one, other)]
            return AuditDifference(min(step for step in steps if step is not None), "step", *steps)
        for field in fields:
            if getattr(one, field) != getattr(other, field):
                return AuditDifference(one.step, field, getattr(one, field), getattr(other, field))
    return None
