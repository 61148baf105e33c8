"""Finds where a step that was not finite went wrong. Runs after such a step only, and changes nothing.

    weights of every rank       one is not finite                     ->  its name and rank
    each micro-batch once more  under a hook on every module          ->  the first whose output is not finite, its rank
    its gradient once more      where weights are whole (not ZeRO 3)  ->  the first parameter whose gradient is not

Every rank runs the same forward passes, as ZeRO 3 needs, and hears the same answer. Dropout draws the same noise again.
Costs a forward pass a micro-batch; a backward pass, and the memory of one more gradient, where all of these are finite.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pretrain import dist
from pretrain.engine.engine import Engine
from pretrain.types import Batch


@dataclass(frozen=True, slots=True)
class Fault:
    """What was found.

    Attributes:
        what: One clause, for people.
        name: Of the weight, module or parameter; None where all was finite when it ran again.
        rank: Where; the lowest one. None likewise.
        sample_ids: Of the micro-batch on that rank; empty where no micro-batch is to blame.
    """

    what: str
    name: str | None = None
    rank: int | None = None
    sample_ids: tuple[int, ...] = ()


def find_fault(engine: Engine, batches: Sequence[Batch], seed: Callable[[int], None], scale: float) -> Fault:
    """Returns where the values of a step cease to be finite, the same on every rank. Collective.

    Args:
        engine: As it was when the step was skipped.
        batches: This rank's micro-batches of the step, as many as every rank has.
        seed: Seeds the dropout of a micro-batch by its number.
        scale: Of the losses, as in training.
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
