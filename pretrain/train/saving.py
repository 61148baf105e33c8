"""When the loop saves, and what becomes of a save that fails: training goes on, until too many have failed in a row.

after a step  ->  the save in flight goes a phase further, if all ranks have done their part (`Agreed.num_written`)
              ->  the next one begins, if one is due: the step waits for a copy to host memory, no more
at the end    ->  the one in flight is waited for, and the last step is saved
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from functools import partial
from types import TracebackType

from pretrain.checkpoint.agree import nothing
from pretrain.checkpoint.save import Save
from pretrain.checkpoint.state import TrainState
from pretrain.errors import DiskError, DivergedError, PretrainError
from pretrain.train.best import SAVED, note_commit
from pretrain.train.build import Run

log = logging.getLogger(__name__)

MAX_FAILED_SAVES = 3
JOIN_S = 5.0


class Saving:
    """The checkpoints of a run in progress. All ranks call the same methods at the same steps.

    Args:
        run: What is saved, where, and how often.
        step: The step that the run begins with; it needs no checkpoint.
    """

    def __init__(self, run: Run, step: int) -> None:
        self._run, self._step, self._saved_step, self._num_failed = run, step, step, 0
        self._save: Save | None = None
        self._begun_at = self._stall_s = 0.0
        self._has_waited = False

    @property
    def is_written(self) -> bool:
        """Whether this rank's part of what is in flight is done: for the exchange of the step."""
        return self._save is not None and self._save.is_done

    def before_update(self) -> None:
        """Must be called before the state changes: on CUDA, the update waits for copies that are under way."""
        if self._save is not None:
            self._run.checkpoints.hold()

    def after_step(self, state: TrainState, num_written: int, *, may_begin: bool) -> None:
        """Follows the save in flight, and begins the next where it is due: a full disk is no reason to stop training.

        Args:
            state: Of the step that has ended.
            num_written: Ranks that have done their part, as all ranks have heard.
            may_begin: Whether the run goes on after this step.

        Raises:
            DiskError: The third save in a row could not be written.
            CheckpointError: The state is not one to go back to.
            LockedError: The run folder is another attempt's by now.
        """
        self._step = state.step
        if self._save is not None and num_written == self._run.world.size:
            with self._failures_counted(), self._run.meter.excluded():
                self._advance()
        every = self._run.config.checkpoint.every_steps
        if may_begin and every and state.step % every == 0:
            with self._failures_counted(), self._run.meter.excluded():
                self._make_way(state.step)
            with self._failures_counted(), self._run.meter.excluded():
                self._begin(state)

    def finish(self, state: TrainState) -> None:
        """Waits for the save in flight, and leaves a checkpoint of the last step.

        Raises:
            DiskError: The last step could not be saved.
            CheckpointError, LockedError: As in `after_step`.
        """
        self._step = state.step
        try:
            self._wait()
        except DiskError as error:
            self._save, self._saved_step = None, -1
            self._warn("%s", error)
        if state.step != self._saved_step:
            self._begin(state)
            self._wait()

    def __enter__(self) -> "Saving":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Lets the save in flight come to its end after an error in the loop, as far as that is possible.

        With several ranks, that takes an error which all of them have met at the same step; else a rank that waits
        for the others might wait for a dead one.
        """
        if self._save is None or self._save.is_finished:
            return
        if self._run.world.size == 1 or isinstance(error, DivergedError):
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
            self._save, self._saved_step = None, -1
            self._num_failed += 1
            if self._num_failed >= MAX_FAILED_SAVES:
                raise
            every = self._run.config.checkpoint.every_steps
            self._warn("%s; training goes on, the next save is in %d steps at the latest", error, every)

    def _begin(self, state: TrainState) -> None:
        run, self._begun_at = self._run, time.monotonic()
        ledger = nothing if run.audit is None else run.audit.sync
        note = partial(note_commit, run.folder, state.step)
        self._save = run.checkpoints.begin(run.engine.state, state, before_commit=ledger, after_commit=note)
        self._stall_s = time.monotonic() - self._begun_at

    def _advance(self) -> None:
        assert self._save is not None
        save, was_committed = self._save, self._save.is_committed
        save.advance()
        if save.is_committed and not was_committed:
            self._saved_step = save.step
            if self._run.world.is_main:
                seconds = time.monotonic() - self._begun_at
                log.info("saved %s in %.1f s, training waited %.2f s", save.path, seconds, self._stall_s)
                self._note(save.step, seconds)
                self._run.tracker.checkpoint(save.step, save.path)
        if save.is_finished:
            self._save, self._num_failed = None, 0

    def _note(self, saved_step: int, seconds: float) -> None:
        figures = {SAVED: saved_step, "checkpoint_stall_s": self._stall_s, "checkpoint_write_s": seconds}
        self._run.tracker.log(self._step, figures, shown=False)

    def _wait(self) -> None:
        while self._save is not None:
            self._run.progress.go_on()
            self._save.join()
            self._advance()

    def _make_way(self, step: int) -> None:
        """Waits for the save in flight, if the next is due: there are buffers for one. Says so the first time."""
        if self._save is None:
            return
        slow, begun = self._save, time.monotonic()
        self._wait()
        if not self._has_waited:
            self._has_waited = True
            self._warn(
                "the save of step %d was still under way when that of step %d was due: training waited %.1f s for it "
                "to end, %.1f s after it had begun; raise checkpoint.every_steps (now %d) or write to a faster disk",
                slow.step,
                step,
                time.monotonic() - begun,
                time.monotonic() - self._begun_at,
                self._run.config.checkpoint.every_steps,
            )

    def _warn(self, text: str, *values: object) -> None:
        if self._run.world.is_main:
            log.warning(text, *values)
