"""When the loop saves, and what becomes of a save that fails: training goes on, until too many have failed in a row."""

import logging
import time

from pretrain.checkpoint.state import TrainState
from pretrain.errors import DiskError
from pretrain.train.build import Run

log = logging.getLogger(__name__)

MAX_FAILED_SAVES = 3


class Saving:
    """The checkpoints of a run in progress. Every method is collective.

    Args:
        run: What is saved, where, and how often.
        step: The step that the run begins with; it needs no checkpoint.
    """

    def __init__(self, run: Run, step: int) -> None:
        self._run, self._saved_step, self._num_failed = run, step, 0

    def after_step(self, state: TrainState) -> None:
        """Saves where a save is due: a full disk is no reason to stop training.

        Raises:
            DiskError: The third save in a row could not be written.
        """
        every = self._run.config.checkpoint.every_steps
        if not every or state.step % every:
            return
        try:
            with self._run.meter.excluded():
                self._save(state)
        except DiskError as error:
            self._num_failed += 1
            if self._num_failed >= MAX_FAILED_SAVES:
                raise
            if self._run.world.is_main:
                log.warning("%s; training goes on, the next save is in %d steps", error, every)

    def finish(self, state: TrainState) -> None:
        """Leaves a checkpoint of the last step. Raises: DiskError."""
        if state.step != self._saved_step:
            self._save(state)

    def _save(self, state: TrainState) -> None:
        run = self._run
        if run.audit is not None:
            run.audit.sync()
        started = time.monotonic()
        path = run.checkpoints.save(run.engine.state, state)
        self._saved_step, self._num_failed = state.step, 0
        if run.world.is_main:
            log.info("saved %s in %.1f s", path, time.monotonic() - started)
