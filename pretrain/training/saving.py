"""The checkpoints of a run in progress: when one begins, and what happens when one fails.

    after a step  ->  the save in flight advances a phase, once all ranks have done their part
                  ->  the next one begins, if due: the next update waits for a copy to host memory only
                  ->  so does a copy that stays in memory (memory_copies.py)
    at the end    ->  the save in flight is waited for, and the last step is saved and uploaded

A save that fails is a warning and training continues; `MAX_FAILED_SAVES` in a row end the run.
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType

from pretrain.checkpoint.agree import nothing
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.save import Save
from pretrain.checkpoint.state import TrainState
from pretrain.checkpoint.upload import Uploads
from pretrain.dist import World
from pretrain.errors import DiskError, DivergedError, PretrainError
from pretrain.run.folder import SAVED, RunDir
from pretrain.run.heartbeat import Progress
from pretrain.tracking.audit import AuditLedger
from pretrain.tracking.run_output import RunOutput
from pretrain.training.claim import note_commit
from pretrain.types import FragmentStore

log = logging.getLogger(__name__)

MAX_FAILED_SAVES = 3
JOIN_S = 5.0


@dataclass(kw_only=True)
class Saving:
    """The saves of a run, one in flight at a time, with the same calls on all ranks."""

    checkpoints: CheckpointManager
    store: FragmentStore
    # run.json of the folder notes each commit.
    folder: RunDir
    # Durable before each commit; None on ranks other than 0.
    audit: AuditLedger | None
    tracker: RunOutput
    # Extends the time limit of the watchdog while a save is waited for.
    progress: Progress
    world: World
    # 0: only the last step is saved.
    every_steps: int
    # Last step done. The one that the run begins with needs no checkpoint.
    step: int
    # None: checkpoints stay in the run folder.
    uploads: Uploads | None = None
    _save: Save | None = field(default=None, init=False)
    _num_failed: int = field(default=0, init=False)
    _begun_at: float = field(default=0.0, init=False)
    _stall_s: float = field(default=0.0, init=False)
    _has_waited: bool = field(default=False, init=False)
    _has_reserved: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._saved_step = self.step

    @property
    def is_written(self) -> bool:
        """Whether this rank's part of the save in flight is done, for the exchange of the step."""
        return self._save is not None and self._save.is_done

    def before_update(self) -> None:
        """Makes the update wait for copies of the weights under way."""
        if self._save is not None:
            begun = time.monotonic()
            self.checkpoints.hold()
            self._stall_s += time.monotonic() - begun
        if self.checkpoints.copies is not None:
            self.checkpoints.copies.hold()

    def after_step(self, state: TrainState, num_written: int, *, may_begin: bool) -> None:
        """Advances the save in flight, and begins the next one where it is due.

        `num_written` ranks have done their part, by the exchange of the step; with `may_begin` the
        run continues after it.

        Raises:
            DiskError: `MAX_FAILED_SAVES` in a row could not be written.
            CheckpointError: The state is not one to go back to.
            LockedError: Another attempt has taken the run folder, or that in the bucket.
        """
        self.step = state.step
        if not self._has_reserved:
            self.checkpoints.reserve(self.store)
            self._has_reserved = True
        if self.uploads is not None:
            for step, seconds in self.uploads.take_finished():
                figures = {"uploaded_step": step, "checkpoint_upload_s": seconds}
                self.tracker.log(self.step, figures, shown=False)
        if self._save is not None and num_written == self.world.size:
            with self._failures_counted():
                self._advance()
        if may_begin and self.every_steps and state.step % self.every_steps == 0:
            with self._failures_counted():
                self._make_way(state.step)
            with self._failures_counted():
                self._begin(state)
        copies = self.checkpoints.copies
        has_rows = self.audit is None or not self.audit.has_waiting  # else a recovery would lack them
        if may_begin and copies is not None and has_rows:
            copies.take(self.store, state)

    def finish(self, state: TrainState, *, is_last: bool) -> None:
        """Waits for the save in flight, saves this step, and waits for uploads.

        Raises: as `after_step`; DiskError: This is the last step of the run, and is not uploaded.
        """
        self.step = state.step
        self.tracker.advance(state.step, "saving")
        if self.uploads is not None:
            self.uploads.hurry()
        try:
            self._wait()
        except DiskError as error:
            self._drop()
            self._warn("%s", error)
        if state.step != self._saved_step:
            try:
                self._begin(state)
                self._wait()
            except DiskError as error:
                raise DiskError(
                    error.what,
                    where=error.where,
                    fix=f"{error.fix}, and the same command continues the run",
                ) from None
        if self.uploads is not None:
            self.uploads.finish(self._show, must=is_last)

    def _show(self, text: str) -> None:
        self.progress.go_on()
        self.tracker.advance(self.step, text)

    def __enter__(self) -> "Saving":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finishes the save in flight after an error of the loop, unless a rank may be gone."""
        if self._save is None or self._save.is_finished:
            return
        # All ranks meet a `DivergedError` at the same step. The phases of a save are collective,
        # and a rank that failed alone is not there for them.
        if self.world.size == 1 or isinstance(error, DivergedError):
            try:
                self._wait()
            except PretrainError as failure:
                self._warn("%s", failure)
        else:
            self._save.join(JOIN_S)

    @contextlib.contextmanager
    def _failures_counted(self) -> Iterator[None]:
        try:
            yield
        except DiskError as error:
            self._drop()
            self._num_failed += 1
            if self._num_failed >= MAX_FAILED_SAVES:
                raise
            self._warn("%s; training continues, the next save is in %d steps at the latest", error, self.every_steps)

    def _drop(self) -> None:
        self._save = None
        self._saved_step = -1

    def _begin(self, state: TrainState) -> None:
        self._begun_at = time.monotonic()
        sync_ledger = nothing if self.audit is None else self.audit.sync
        note = partial(note_commit, self.folder, state.step)
        self._save = self.checkpoints.begin(self.store, state, before_commit=sync_ledger, after_commit=note)
        self._stall_s = time.monotonic() - self._begun_at

    def _advance(self) -> None:
        assert self._save is not None
        save = self._save
        was_committed = save.is_committed
        save.advance()
        if save.is_committed and not was_committed:
            self._saved_step = save.step
            if self.world.is_main:
                seconds = time.monotonic() - self._begun_at
                log.info("saved %s in %.1f s, training waited %.2f s", save.path, seconds, self._stall_s)
                figures = {SAVED: save.step, "checkpoint_stall_s": self._stall_s, "checkpoint_write_s": seconds}
                self.tracker.log(self.step, figures, shown=False)
                self.tracker.checkpoint(save.step, save.path)
        if save.is_finished:
            self._save = None
            self._num_failed = 0
            if self.uploads is not None and save.is_committed:
                self.uploads.offer(save.path)

    def _wait(self) -> None:
        while self._save is not None:
            self.progress.go_on()
            self._save.join()
            self._advance()

    def _make_way(self, step: int) -> None:
        """Waits for the save in flight, as there are buffers for one only; warns the first time."""
        slow = self._save
        if slow is None:
            return
        begun = time.monotonic()
        self._wait()
        if not self._has_waited:
            self._has_waited = True
            text = (
                "the save of step %d was still under way when that of step %d was due: training waited %.1f s for it "
                "to end, %.1f s after it had begun; raise checkpoint.every_steps (now %d) or write to a faster disk"
            )
            now = time.monotonic()
            self._warn(text, slow.step, step, now - begun, now - self._begun_at, self.every_steps)

    def _warn(self, text: str, *values: object) -> None:
        if self.world.is_main:
            log.warning(text, *values)
