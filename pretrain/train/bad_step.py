"""What is done about a step that was not finite: said, written down with its cause, and in a row the end of the run.

    bad_step.json   {"step", "loss", "in_a_row", "fault", "name", "rank", "fault_sample_ids", "sample_ids"}

Such a step has changed nothing on any rank (`Engine.update`). In fp16 a gradient overflows now and then by design, and
the loss scale answers; there the cause is looked for when the loss is not finite, or the run is about to end.
"""

import json
import logging
import math
from functools import partial

from pretrain import dist
from pretrain.checkpoint.state import TrainState
from pretrain.data.loader import StepBatch
from pretrain.errors import DiskError, DivergedError
from pretrain.train.build import Run
from pretrain.train.diagnose import Fault, find_fault
from pretrain.train.noise import seed_dropout
from pretrain.utils.io import write_file

log = logging.getLogger(__name__)


def report_bad_step(run: Run, state: TrainState, batch: StepBatch, loss: float, num_targets: int) -> None:
    """Says which samples a skipped step had, and where it went wrong. Collective.

    Args:
        run: Whose it was.
        state: After it: `state.step` is the step that was skipped.
        batch: This rank's part of it.
        loss: Mean over its targets.
        num_targets: Of all ranks.

    Raises:
        DivergedError: `optim.max_bad_steps` in a row.
    """
    in_a_row, limit = state.bad_steps_in_a_row, run.config.optim.max_bad_steps
    is_last = in_a_row >= limit
    fault = None
    if run.config.engine.precision != "fp16" or is_last or not math.isfinite(loss):
        scale = run.world.size / max(num_targets, 1)
        fault = find_fault(run.engine, batch.micro_batches, partial(_seed, run, state.step - 1), scale)
    ids = [sample for rank_ids in dist.gather_objects(list(batch.sample_ids)) for sample in rank_ids]
    cause = "" if fault is None else f": {fault.what}"
    if run.world.is_main:
        log.warning(
            "step %d was not finite (loss %s) and was skipped, %d in a row%s", state.step, loss, in_a_row, cause
        )
        _write(run, state, loss, ids, fault)
    if is_last:
        raise DivergedError(
            f"the gradient was not finite for {in_a_row} steps in a row, up to step {state.step}{cause}",
            where=str(run.folder.path / "bad_step.json"),
            fix=_advice(run, fault),
        )


def _seed(run: Run, step: int, micro: int) -> None:
    run.progress.go_on()  # each pass may take as long as one of training
    seed_dropout(run.config, run.world, step, micro)


def _write(run: Run, state: TrainState, loss: float, ids: list[int], fault: Fault | None) -> None:
    row = {
        "step": state.step,
        "loss": repr(loss),
        "in_a_row": state.bad_steps_in_a_row,
        "fault": None if fault is None else fault.what,
        "name": None if fault is None else fault.name,
        "rank": None if fault is None else fault.rank,
        "fault_sample_ids": [] if fault is None else list(fault.sample_ids),
        "sample_ids": ids,
    }
    try:
        write_file(run.folder.path / "bad_step.json", json.dumps(row).encode() + b"\n")
    except DiskError as error:  # a full disk is no reason to stop training
        log.warning("%s; what there is to say of step %d is not kept", error, state.step)


def _advice(run: Run, fault: Fault | None) -> str:
    if fault is not None and fault.what.startswith("the weight "):
        return "go back to a checkpoint from before, and look for memory errors on that machine"
    if run.config.engine.precision == "fp16" and run.engine.state.scalars().get("loss_scale.cur_scale", 2.0) <= 1.0:
        return "the loss scale is at its minimum, 1: fp16 cannot hold these values; use engine.precision=bf16"
    return "lower optim.lr, or leave the samples named there out with `pretrain rollback`; the last checkpoint is good"
