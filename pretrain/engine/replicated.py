"""Optimizer state as fragments, and the state of engines that replicate weights (DDP, one process, ZeRO 0).

torch optimizers create their state in the first `step()`; loading, and saving at step 0, need it before. AdamW has two
moments of the shape of each parameter; an optimizer over whole matrices yields its own (`WholeOptimizer.fragments`).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pretrain import dist
from pretrain.dist import World
from pretrain.engine.engine import Update
from pretrain.optim.matrices import WholeOptimizer
from pretrain.optim.pieces import Span, WeightPiece
from pretrain.types import Batch, Fragment

MOMENTS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    WholeOptimizer: ("exp_avg", "exp_avg_sq"),  # of its AdamW groups
}
"""State tensors of each optimizer, of the shape of the parameter."""


def place_whole(optimizer: torch.optim.Optimizer, masters: Sequence[Tensor], pieces: Sequence[WeightPiece]) -> None:
    """Registers the matrices of an optimizer over whole matrices: each is whole on every rank."""
    if isinstance(optimizer, WholeOptimizer):
        optimizer.place(masters, pieces, [[piece.span for piece in pieces]], rank=0)


def place_cut(
    optimizer: torch.optim.Optimizer, masters: Sequence[Tensor], pieces: Sequence[WeightPiece], rank: int
) -> None:
    """Registers the matrices of an optimizer over whole matrices: each is sharded over the ranks. Collective."""
    if isinstance(optimizer, WholeOptimizer):
        gathered = dist.gather_objects([piece.span for piece in pieces])
        optimizer.place(masters, pieces, [[Span(*values) for values in spans] for spans in gathered], rank)


def state_fragments(optimizer: torch.optim.Optimizer, pieces: Sequence[WeightPiece]) -> Iterator[Fragment]:
    """Yields master weights with their moments, piece by piece, then the state of an optimizer over whole matrices."""
    for piece in pieces:
        tensors = {"weight": piece.weight}
        if not _is_whole(optimizer, piece.master):
            create_moments_of(optimizer, piece.master)
            for key in MOMENTS[type(optimizer)]:
                flat = optimizer.state[piece.master][key].view(-1)
                tensors[key] = flat.narrow(0, piece.span.start, piece.span.length)
        yield Fragment(piece.span.name, piece.span.offset, piece.shape, tensors)
    if isinstance(optimizer, WholeOptimizer):
        yield from optimizer.fragments()


def _is_whole(optimizer: torch.optim.Optimizer, master: Tensor) -> bool:
    return isinstance(optimizer, WholeOptimizer) and optimizer.takes_whole(master)


def create_moments_of(optimizer: torch.optim.Optimizer, master: Tensor) -> None:
    """Creates the state that the optimizer would create in its first step: zeros, and a step count of 0."""
    state = optimizer.state[master]
    if not state:
        # Fused kernels need the count on the device of the parameter.
        state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
        for key in MOMENTS[type(optimizer)]:
            state[key] = torch.zeros_like(master, memory_format=torch.preserve_format)


def set_optimizer_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Sets the step count of all state."""
    for state in optimizer.state.values():
        if "step" in state:  # under ZeRO, the flat tensor of whole matrices has no AdamW state
            state["step"].fill_(step)
    if isinstance(optimizer, WholeOptimizer):
        optimizer.set_step(step)


def working_weights(module: nn.Module, names: dict[int, str]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name in checkpoints, live tensor) of each parameter, shared ones once; at ZeRO 3 this rank's shares."""
    for parameter in module.parameters():
        share = getattr(parameter, "ds_tensor", None)
        yield names[id(parameter)], parameter.data if share is None else share.data


class WrappedModule:
    """Forward passes without gradient, and the weights they read: the part of `Engine` that both engines share.

    Args:
        wrapped: The module in the wrapper of DeepSpeed or DDP.
        module: The same without the wrapper.
        names: Name of each parameter in checkpoints, by `id(parameter)`.
    """

    def __init__(self, wrapped: Any, module: nn.Module, names: dict[int, str]) -> None:
        self.module = module
        self._wrapped = wrapped
        self._names = names

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """See `Engine.evaluate`."""
        self._wrapped.eval()
        return self._wrapped(batch)[1]

    @torch.no_grad()
    def rehearse(self, batch: Batch) -> None:
        """See `Engine.rehearse`."""
        self._wrapped.train()
        self._wrapped(batch)

    def working_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.working_weights`."""
        return working_weights(self.module, self._names)


def clip_or_drop(parameters: Sequence[Tensor], grad_clip: float, drop: bool = False) -> Update:
    """Clips the reduced gradients to a global norm; discards them if the norm is not finite, or with `drop`.

    Every torch optimizer skips a parameter without a gradient, its moments and step count too. All ranks have the same
    reduced gradients and decide alike.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    grad_norm = float(norm)
    skipped = drop or not math.isfinite(grad_norm)
    if skipped:
        for parameter in parameters:
            parameter.grad = None
    elif grad_clip:
        torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip, norm)
    return Update(grad_norm, skipped)


class ReplicatedState:
    """Master weights and moments that are whole on every rank; each rank saves an even share.

    Args:
        masters: (name, fp32 parameter that the optimizer updates).
        optimizer: Optimizer of the masters.
        world: Rank and world size: the share that this rank saves.
    """

    def __init__(self, masters: list[tuple[str, Tensor]], optimizer: torch.optim.Optimizer, world: World) -> None:
        self._optimizer, self._world = optimizer, world
        self._pieces = [
            WeightPiece(Span(name, slot, offset=0, start=0, length=master.numel()), tuple(master.shape), master)
            for slot, (name, master) in enumerate(masters)
        ]
        place_whole(optimizer, [master for _, master in masters], self._pieces)

    def held_fragments(self) -> Iterator[Fragment]:
        """Yields every parameter, and the state of every matrix, whole."""
        yield from state_fragments(self._optimizer, self._pieces)

    def owned_fragments(self) -> Iterator[Fragment]:
        """Yields this rank's even share of every fragment."""
        rank, size = self._world.rank, self._world.size
        for whole in self.held_fragments():
            start, end = whole.length * rank // size, whole.length * (rank + 1) // size
            if start < end:
                tensors = {key: tensor[start:end] for key, tensor in whole.tensors.items()}
                yield Fragment(whole.name, whole.offset + start, whole.shape, tensors)

    def scalars(self) -> dict[str, float]:
        """Returns nothing: there is no loss scale."""
        return {}

    def finish_load(self, optimizer_step: int, scalars: dict[str, float]) -> None:
        """See `FragmentStore.finish_load`."""
        set_optimizer_step(self._optimizer, optimizer_step)
