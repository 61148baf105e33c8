"""Watches the numbers of a run: bad steps, loss spikes, replicas that come to differ.

    update   the step is applied, beside the exchange of the ranks' sums; or, where spikes are skipped, after it
    judge    what the step was goes into the state, so that a run that resumes counts on         (no communication)
    act      a bad step is looked into (bad_step.py), a spike is answered, replicas are compared when it is due

All ranks hear the same sums, so all judge alike. Costs some 13 us a step; the comparison of replicas reads every weight
once, every `guard.check_replicas_every` steps and before checkpoints.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from pretrain.checkpoint.state import TrainState
from pretrain.data.loader import StepBatch
from pretrain.engine.engine import Update
from pretrain.errors import DivergedError
from pretrain.train.bad_step import report_bad_step
from pretrain.train.build import Run
from pretrain.train.replicas import check_replicas
from pretrain.train.spike import SpikeDetector
from pretrain.train.step_totals import Agreed

log = logging.getLogger(__name__)


class SpikeError(DivergedError):
    """A spike at which the run is to go back (`guard.on_spike: rollback`).

    Attributes:
        state: After the spike.
    """

    def __init__(self, state: TrainState, what: str) -> None:
        super().__init__(what, fix="lower optim.lr, or raise guard.spike_threshold")
        self.state = state


class Guard:
    """The watch over a run in progress. All ranks call the same methods at the same steps.

    Args:
        run: What is watched.
        state: The run begins with it.
    """

    def __init__(self, run: Run, state: TrainState) -> None:
        self._run, self._config = run, run.config.guard
        self._detector = SpikeDetector(self._config.spike_window, self._config.spike_threshold, state.losses)
        self._dropped = False
        self._loss = self._deviation = 0.0
        self._num_targets = 0
        if run.engine.is_sharded and self._config.check_replicas_every and run.world.size > 1 and run.world.is_main:
            log.info("guard.check_replicas_every: at ZeRO 3 no weight is held twice, there is nothing to compare")

    def update(self, learning_rate: float, num_targets: int, pending: Callable[[], Agreed]) -> tuple[Update, Agreed]:
        """Applies a step, or drops it where it is a spike to be skipped; returns the update and what the ranks agreed.

        Args:
            learning_rate: Of this step.
            num_targets: Of all ranks.
            pending: Waits for the exchange that runs.
        """
        if self._config.on_spike != "skip":
            self._dropped = False
            return self._run.engine.update(learning_rate), pending()
        agreed = pending()
        self._dropped = self._detector.is_spike(agreed.loss_sum / max(num_targets, 1))
        return self._run.engine.update(learning_rate, drop=self._dropped), agreed

    def judge(self, state: TrainState, loss: float, num_targets: int, update: Update) -> TrainState:
        """Returns the state after a step, with what the step was counted in.

        Args:
            state: After it.
            loss: Mean over its targets.
            num_targets: Of all ranks.
            update: What became of it.
        """
        is_bad = update.skipped and not self._dropped
        self._loss, self._num_targets = loss, num_targets
        self._deviation = 0.0 if is_bad or not num_targets else self._detector.deviation(loss)
        is_spike = self._deviation > self._config.spike_threshold
        in_a_row = state.spikes_in_a_row + 1 if is_spike else 0
        if num_targets:  # without one the loss is 0, and says nothing
            self._detector.add(loss)
        if self._dropped and in_a_row >= self._config.max_skips:
            self._detector.forget()
        return replace(
            state,
            losses=self._detector.losses,
            spikes=state.spikes + is_spike,
            spikes_in_a_row=in_a_row,
            bad_steps_in_a_row=state.bad_steps_in_a_row + 1 if is_bad else 0,
            empty_steps=state.empty_steps + (not num_targets),
        )

    def act(self, state: TrainState, batch: StepBatch) -> None:
        """Does what the step asks for. Collective.

        Raises:
            DivergedError: Too many bad steps in a row, or replicas that differ.
            SpikeError: The run is to go back.
        """
        if not self._num_targets:
            self._warn(
                "step %d has no targets, %d steps so far: nothing was learned of it", state.step, state.empty_steps
            )
        if state.bad_steps_in_a_row:
            report_bad_step(self._run, state, batch, self._loss, self._num_targets)
        elif state.spikes_in_a_row:
            self._answer_spike(state)
        every, saves = self._config.check_replicas_every, self._run.config.checkpoint.every_steps
        if every and (state.step % every == 0 or (saves and state.step % saves == 0)):
            self.check_replicas(state)

    def check_replicas(self, state: TrainState) -> None:
        """Compares the weights that ranks hold alike, unless that is switched off; before the last save too.

        Raises:
            DivergedError: They differ.
        """
        if self._config.check_replicas_every and self._run.world.size > 1 and not self._run.engine.is_sharded:
            with self._run.meter.excluded():
                check_replicas(self._run.engine, state.step)

    def metrics(self, state: TrainState) -> dict[str, float]:
        """Returns the counts of what has happened, where it has."""
        counts = {"spikes": state.spikes, "empty_steps": state.empty_steps}
        return {name: float(count) for name, count in counts.items() if count}

    def _answer_spike(self, state: TrainState) -> None:
        text = (
            f"step {state.step} is a loss spike: {self._loss:.4g} is {self._deviation:.1f} robust standard deviations "
            f"above the median of the last {len(state.losses) or self._config.spike_window}"
        )
        if self._config.on_spike == "rollback":
            raise SpikeError(state, text)
        if self._dropped and not state.losses:
            self._warn("%s; %d in a row were skipped: it is taken for the new level", text, state.spikes_in_a_row)
        elif self._dropped:
            self._warn("%s; it was skipped", text)
        elif state.spikes_in_a_row == 1:
            self._warn("%s", text)

    def _warn(self, text: str, *values: object) -> None:
        if self._run.world.is_main:
            log.warning(text, *values)
