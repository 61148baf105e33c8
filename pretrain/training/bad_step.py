"""Steps that teach nothing: bad ones, whose gradient is not finite; empty ones, without a target.

A bad step is a warning, a bad_step.json, and an end after several:

    {"step", "loss", "in_a_row", "fault", "name", "rank", "fault_sample_ids", "sample_ids"}

No checkpoint begins at a bad step, unless the run is stopped there, and a run does not end in one.

The search for the cause runs after such a step only, and changes nothing:

    weights of every rank       one is not finite                     ->  its name and rank
    each micro-batch once more  under a hook on every module          ->  the first bad output
    its gradient once more      where weights are whole (not ZeRO 3)  ->  the first bad gradient

Every rank runs the same forward passes, as ZeRO 3 needs, with the same dropout. A bad step has
changed nothing on any rank (`Engine.update`). In fp16 gradients overflow now and then by design;
there the search runs only when the loss is not finite, or the run is about to end.

An empty step is a warning with its reason. A run of such steps alone is an error at its end.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from pretrain import dist
from pretrain.checkpoint.state import TrainState
from pretrain.data.loader import StepBatch, StepCounts
from pretrain.engine.engine import Engine
from pretrain.errors import DataError, DiskError, DivergedError
from pretrain.kinds.objectives import OBJECTIVES
from pretrain.model.lazy_compiler import running_eagerly
from pretrain.training.build import Run
from pretrain.training.step import seed_noise
from pretrain.types import Batch
from pretrain.utils.io import write_file
from pretrain.utils.units import plural

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fault:
    """Cause of a bad step."""

    what: str  # description, one clause
    # Name of the weight, module or parameter; None where everything was finite when repeated.
    name: str | None = None
    rank: int | None = None  # lowest rank that has it; None where everything was finite
    # Sample ids of the micro-batch on that rank; empty where no micro-batch is the cause.
    sample_ids: tuple[int, ...] = ()


def find_fault(engine: Engine, batches: Sequence[Batch], seed: Callable[[int], None], scale: float) -> Fault:
    """Returns where the values of a skipped step cease to be finite, on all ranks. Collective.

    Every rank has as many micro-batches; `seed` seeds the dropout of one by its number.
    """
    weights = (name for name, weight in engine.working_weights() if not _is_finite(weight))
    if fault := _agree("the weight {} is not finite on rank {}", next(weights, None)):
        return fault
    for number, batch in enumerate(batches):
        seed(number)
        name = _bad_module(engine, batch.to(engine.device))
        sentence = "the first output that is not finite is that of {} on rank {}"
        if fault := _agree(sentence, name, batch.sample_ids()):
            return fault
    if engine.needs_all_ranks:
        return Fault("every output is finite: the gradient overflows")
    for number, batch in enumerate(batches):
        seed(number)
        name = _bad_gradient(engine, batch.to(engine.device), scale)
        sentence = "every output is finite, and the gradient overflows: first that of {} on rank {}"
        if fault := _agree(sentence, name, batch.sample_ids()):
            return fault
    return Fault("run again, outputs and gradients are finite: their sum overflows, or the hardware erred")


def _agree(what: str, name: str | None, sample_ids: Sequence[int] = ()) -> Fault | None:
    """Returns the fault of the lowest rank that found a name; None where none did. Collective."""
    for rank, (fault, ids) in enumerate(dist.gather_objects((name, list(sample_ids)))):
        if fault is not None:
            return Fault(what.format(fault, rank), fault, rank, tuple(ids))
    return None


def _is_finite(value: Tensor) -> bool:
    return not value.is_floating_point() or bool(torch.isfinite(value).all())


def _bad_module(engine: Engine, batch: Batch) -> str | None:
    """Returns the first module to end with an output that is not finite; the innermost one."""
    names: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not names and not all(_is_finite(tensor) for tensor in _tensors(output)):
                names.append(name)

        return hook

    modules = engine.module.named_modules()
    handles = [module.register_forward_hook(watch(_shown(name))) for name, module in modules]
    try:
        # Inside a compiled block hooks are not called.
        with running_eagerly():
            engine.rehearse(batch)
    finally:
        for handle in handles:
            handle.remove()
    return next(iter(names), None)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _shown(name: str) -> str:
    return {"": "the loss", "model": "the model"}.get(name, name.removeprefix("model."))


def _bad_gradient(engine: Engine, batch: Batch, scale: float) -> str | None:
    """Returns the parameter nearest to the loss whose own gradient on this rank is not finite."""
    named = engine.module.named_parameters()
    trained = [(name, weight) for name, weight in named if weight.requires_grad]
    loss_scale = engine.state.scalars().get("loss_scale.cur_scale", 1.0)
    try:
        with torch.enable_grad():
            loss_sum, _ = engine.module(batch)
            # Not `backward`: the engine's own buffers and hooks are left alone.
            loss = loss_sum * (scale * loss_scale)
            gradients = torch.autograd.grad(loss, [weight for _, weight in trained], allow_unused=True)
    except torch.OutOfMemoryError:
        if batch.columns is not None:
            raise  # the ranks that share these rows wait in the pass
        return None
    pairs = zip(reversed(trained), reversed(gradients), strict=True)
    bad = (name for (name, _), grad in pairs if grad is not None and not _is_finite(grad))
    return next(map(_shown, bad), None)


def is_spoiled(run: Run, state: TrainState, loss: float) -> bool:
    """Returns whether the last step was bad, and not one whose gradient overflowed in fp16, as by design."""
    return state.bad_steps_in_a_row > 0 and (run.config.engine.precision != "fp16" or not math.isfinite(loss))


def _reason(run: Run, num_skipped: int) -> str:
    if num_skipped:
        return f"{plural(num_skipped, 'damaged row')} had to be skipped; copy the shards again"
    kinds = [task.kind for task in run.config.objective.tasks]
    of_data = run.dataset.index.layout.no_targets
    reasons = [of_data or OBJECTIVES[kind].no_targets for kind in kinds]
    return "; or ".join(dict.fromkeys(reasons))


def refuse_bad_end(run: Run, state: TrainState, loss: float, num_skipped: int = 0) -> None:
    """Refuses to end a run that learned nothing, or with weights of before its last, bad steps.

    Raises:
        DataError: No step had a target.
        DivergedError: The last steps were bad, or none was applied.
    """
    if state.step < run.config.train.last_step:
        return
    steps = plural(state.step, "step")
    if not state.tokens:
        why, _, fix = _reason(run, num_skipped).partition("; ")
        raise DataError(
            f"nothing was learned, as no target was in the run's {steps}: {why}",
            fix=fix,
        )
    if not is_spoiled(run, state, loss):
        if state.optimizer_step:
            return
        raise DivergedError(
            f"nothing was learned: the gradients of all {steps} overflowed in fp16",
            fix="use engine.precision=bf16, or more steps",
        )
    good = state.step - state.bad_steps_in_a_row
    bad = f"step {state.step}" if state.bad_steps_in_a_row == 1 else f"steps {good + 1} to {state.step}"
    raise DivergedError(
        f"the run ends in {bad}, not finite and skipped; no checkpoint of them is kept",
        where=str(run.folder.path / "bad_step.json"),
        fix=(f"end it before by train.stop_after={good}, or " if good else "") + _advice(run, None, good),
    )


def report_step(run: Run, state: TrainState, batch: StepBatch, loss: float, counts: StepCounts) -> None:
    """Reports the step `state.step` if it was bad or empty. Collective.

    Raises:
        DivergedError: `optim.max_bad_steps` in a row.
    """
    if state.bad_steps_in_a_row:
        report_bad_step(run, state, batch, loss, counts.num_targets)
    elif not counts.num_targets and run.world.is_main:
        so_far, reason = plural(state.empty_steps, "step"), _reason(run, counts.num_skipped)
        text = "step %d has no targets and changes nothing, %s so far: %s"
        log.warning(text, state.step, so_far, reason)


def report_bad_step(run: Run, state: TrainState, batch: StepBatch, loss: float, num_targets: int) -> None:
    """Reports the samples of the skipped step `state.step`, and where it went wrong. Collective.

    Raises:
        DivergedError: `optim.max_bad_steps` in a row.
    """
    in_a_row = state.bad_steps_in_a_row
    is_last = in_a_row >= run.config.optim.max_bad_steps
    fault = None

    def seed(micro: int) -> None:
        run.progress.go_on()  # each pass may take as long as one of training
        seed_noise(run.config, run.world, state.step - 1, micro)

    if is_last or is_spoiled(run, state, loss):
        scale = run.world.size / max(num_targets, 1)
        fault = find_fault(run.engine, batch.micro_batches, seed, scale)
    own_ids = [] if run.world.row_rank else list(batch.sample_ids)
    ids = list(chain.from_iterable(dist.gather_objects(own_ids)))
    cause = "" if fault is None else f": {fault.what}"
    if run.world.is_main:
        text = "step %d was not finite (loss %.4g) and was skipped, %d in a row%s"
        log.warning(text, state.step, loss, in_a_row, cause)
        _write(run, state, loss, ids, fault)
    if is_last:
        steps = f"for {in_a_row} steps in a row, up to step" if in_a_row > 1 else "at step"
        raise DivergedError(
            f"the gradient was not finite {steps} {state.step}{cause}",
            where=str(run.folder.path / "bad_step.json"),
            fix=_advice(run, fault, state.step - in_a_row),
        )


def _write(run: Run, state: TrainState, loss: float, ids: list[int], fault: Fault | None) -> None:
    cause = fault or Fault("")
    row = {
        "step": state.step,
        "loss": repr(loss),
        "in_a_row": state.bad_steps_in_a_row,
        "fault": cause.what or None,
        "name": cause.name,
        "rank": cause.rank,
        "fault_sample_ids": list(cause.sample_ids),
        "sample_ids": ids,
    }
    try:
        write_file(run.folder.path / "bad_step.json", json.dumps(row).encode() + b"\n")
    except DiskError as error:  # a full disk is no reason to stop training
        log.warning("%s; the report of step %d is lost", error, state.step)


def _advice(run: Run, fault: Fault | None, good_step: int) -> str:
    if fault is not None and fault.what.startswith("the weight "):
        return "go back to a checkpoint from before, and look for memory errors on that machine"
    loss_scale = run.engine.state.scalars().get("loss_scale.cur_scale", 2.0)
    if run.config.engine.precision == "fp16" and loss_scale <= 1.0:
        return "the loss scale is at its minimum, 1: fp16 cannot hold these values; use engine.precision=bf16"
    # Finite weights are no good ones: a high rate may have spoiled them steps before.
    advice = "lower optim.lr, or skip the samples named there"
    # A save that is under way will have been committed.
    is_saved = run.folder.has_saved() or 0 < run.config.checkpoint.every_steps <= good_step
    if not is_saved:
        return advice
    return f"{advice}; `pretrain rollback` goes back to before the loss rose"
