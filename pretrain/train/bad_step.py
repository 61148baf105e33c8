"""Bad steps, whose gradient is not finite: the search for the cause, the report, the end of the run.

Here too: the seed of dropout by counters, which lets the search repeat a step exactly.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pretrain import dist
from pretrain.checkpoint.state import TrainState
from pretrain.config.run import RunConfig
from pretrain.data.loader import StepBatch
from pretrain.dist import World
from pretrain.engine.engine import Engine
from pretrain.errors import DiskError, DivergedError
from pretrain.train.build import Run
from pretrain.types import Batch
from pretrain.utils.io import write_file


def seed_dropout(config: RunConfig, world: World, step: int, micro: int) -> None:
    """Seeds dropout by counters: the same step drops the same units again, and no generator state needs saving."""
    stacks = (config.model.encoder, config.model.decoder)
    rates = [stack.dropout for stack in stacks if stack is not None]
    if any(rate > 0 for rate in (*rates, config.model.head.dropout, config.finetune.dropout)):
        # Odd multipliers spread the counters over 64 bits; the sum is unique for any run that fits a cluster.
        counters = (config.seed, step, micro, world.rank)
        factors = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
        torch.manual_seed(sum(c * f for c, f in zip(counters, factors, strict=True)) % 2**63)


# Search for the cause of a bad step. Runs after such a step only, and changes nothing.
#
#   weights of every rank       one is not finite                     ->  its name and rank
#   each micro-batch once more  under a hook on every module          ->  the first whose output is not finite, its rank
#   its gradient once more      where weights are whole (not ZeRO 3)  ->  the first parameter whose gradient is not
#
# Every rank runs the same forward passes, as ZeRO 3 needs, and gets the same answer, with the same
# dropout. Costs a forward pass per micro-batch; where all are finite, also a backward pass and the
# memory of one more gradient.


@dataclass(frozen=True, slots=True)
class Fault:
    """Cause of a bad step.

    Attributes:
        what: Description, one clause.
        name: Name of the weight, module or parameter; None where everything was finite when repeated.
        rank: Lowest rank that has it; None where everything was finite.
        sample_ids: Sample ids of the micro-batch on that rank; empty where no micro-batch is the cause.
    """

    what: str
    name: str | None = None
    rank: int | None = None
    sample_ids: tuple[int, ...] = ()


def find_fault(engine: Engine, batches: Sequence[Batch], seed: Callable[[int], None], scale: float) -> Fault:
    """Returns where the values of a step cease to be finite, the same on every rank. Collective.

    Args:
        engine: Engine after the skipped step.
        batches: This rank's micro-batches of the step, as many as every rank has.
        seed: Seeds the dropout of a micro-batch by its number.
        scale: Scale of the losses, as in training.
    """
    found = _first(next((name for name, weight in engine.working_weights() if not _is_finite(weight)), None))
    if found is not None:
        rank, name, _ = found
        return Fault(f"the weight {name} is not finite on rank {rank}", name, rank)
    for number, batch in enumerate(batches):
        seed(number)
        found = _first(_bad_module(engine, batch.to(engine.device)), batch.sample_ids)
        if found is not None:
            rank, name, ids = found
            return Fault(f"the first output that is not finite is that of {name} on rank {rank}", name, rank, ids)
    for number, batch in enumerate(() if engine.is_sharded else batches):
        seed(number)
        found = _first(_bad_gradient(engine, batch.to(engine.device), scale), batch.sample_ids)
        if found is not None:
            rank, name, ids = found
            what = f"every output is finite, and the gradient overflows: first that of {name} on rank {rank}"
            return Fault(what, name, rank, ids)
    if engine.is_sharded:
        return Fault("every output is finite: the gradient overflows")
    return Fault("run again, outputs and gradients are finite: their sum overflows, or the hardware erred")


def _first(name: str | None, sample_ids: Sequence[int] = ()) -> tuple[int, str, tuple[int, ...]] | None:
    """Returns (rank, name, sample ids) of the lowest rank that found something; None where none did. Collective."""
    answers = dist.gather_objects((name, list(sample_ids)))
    return next(((rank, found, tuple(ids)) for rank, (found, ids) in enumerate(answers) if found is not None), None)


def _is_finite(value: Tensor) -> bool:
    return not value.is_floating_point() or bool(torch.isfinite(value).all())


def _bad_module(engine: Engine, batch: Batch) -> str | None:
    """Returns the first module, in the order in which they are done, whose output is not finite; the innermost one."""
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not found and not all(_is_finite(tensor) for tensor in _tensors(output)):
                found.append(name)

        return hook

    handles = [module.register_forward_hook(watch(_shown(name))) for name, module in engine.module.named_modules()]
    try:
        # Inside a compiled block hooks are not called.
        with torch.compiler.set_stance("force_eager"):
            engine.rehearse(batch)
    finally:
        for handle in handles:
            handle.remove()
    return next(iter(found), None)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _shown(name: str) -> str:
    """Returns the name of a module of `TrainModule` as its parameters have it."""
    return {"": "the loss", "model": "the model"}.get(name, name.removeprefix("model."))


def _bad_gradient(engine: Engine, batch: Batch, scale: float) -> str | None:
    """Returns the parameter nearest to the loss whose own gradient on this rank is not finite."""
    named = [(_shown(name), parameter) for name, parameter in engine.module.named_parameters()]
    named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    loss_scale = engine.state.scalars().get("loss_scale.cur_scale", 1.0)
    try:
        with torch.enable_grad():
            loss_sum, _ = engine.module(batch)
            # Not `backward`: the engine's own buffers and hooks are left alone.
            gradients = torch.autograd.grad(
                loss_sum * (scale * loss_scale), [parameter for _, parameter in named], allow_unused=True
            )
    except torch.OutOfMemoryError:
        return None
    pairs = zip(reversed(named), reversed(gradients), strict=True)
    return next((name for (name, _), gradient in pairs if gradient is not None and not _is_finite(gradient)), None)


# Report of a bad step: a warning, bad_step.json with the cause, and after several in a row the end
# of the run.
#
#     bad_step.json   {"step", "loss", "in_a_row", "fault", "name", "rank", "fault_sample_ids", "sample_ids"}
#
# A bad step has changed nothing on any rank (`Engine.update`). In fp16 gradients overflow now and
# then by design, and the loss scale adapts; there the search runs only when the loss is not finite,
# or the run is about to end.


log = logging.getLogger(__name__)


def report_bad_step(run: Run, state: TrainState, batch: StepBatch, loss: float, num_targets: int) -> None:
    """Says which samples a skipped step had, and where it went wrong. Collective.

    Args:
        run: Run of the step.
        state: State after it: `state.step` is the step that was skipped.
        batch: This rank's part of the step.
        loss: Mean over its targets.
        num_targets: Targets of the step over all ranks.

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
