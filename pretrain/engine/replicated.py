"""Optimizer state as an engine sees it: made before there was a first step, viewed flat, its step count set.

torch optimizers make their state in the first `step()`. Loading needs it before, and saving at step 0 too. AdamW keeps
two moments of the shape of each tensor it steps, whatever that is; an optimizer over whole matrices keeps its own, and
says where (`WholeOptimizer.fragments`).
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from pretrain import dist
from pretrain.dist import World
from pretrain.engine.engine import Update
from pretrain.optim.matrices import WholeOptimizer
from pretrain.optim.pieces import Span, WeightPiece
from pretrain.types import Fragment

MOMENTS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    WholeOptimizer: ("exp_avg", "exp_avg_sq"),  # of the groups that it steps by AdamW
}

"""The state tensors, shaped like the tensor that is stepped, of each optimizer."""


def place_whole(optimizer: torch.optim.Optimizer, masters: Sequence[Tensor], pieces: Sequence[WeightPiece]) -> None:
    """Tells an optimizer over whole matrices where they are: each whole on every rank."""
    if isinstance(optimizer, WholeOptimizer):
        optimizer.place(masters, pieces, [[piece.span for piece in pieces]], rank=0)


def place_cut(
    optimizer: torch.optim.Optimizer, masters: Sequence[Tensor], pieces: Sequence[WeightPiece], rank: int
) -> None:
    """Tells an optimizer over whole matrices where they are: cut over the ranks. Collective."""
    if isinstance(optimizer, WholeOptimizer):
        gathered = dist.gather_objects([piece.span for piece in pieces])
        optimizer.place(masters, pieces, [[Span(*values) for values in spans] for spans in gathered], rank)


def state_fragments(optimizer: torch.optim.Optimizer, pieces: Sequence[WeightPiece]) -> Iterator[Fragment]:
    """Yields master weights with their moments, piece by piece, then the state of whole matrices."""
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
    """Creates missing state as the optimizer itself would before its first step: zeros, and a step count of 0."""
    state = optimizer.state[master]
    if not state:
        # The fused kernels want the count beside the parameter.
        state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
        for key in MOMENTS[type(optimizer)]:
            state[key] = torch.zeros_like(master, memory_format=torch.preserve_format)


def set_optimizer_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Sets the step count of all state."""
    for state in optimizer.state.values():
        if "step" in state:  # under ZeRO, a tensor of whole matrices has no state of its own
            state["step"].fill_(step)
    if isinstance(optimizer, WholeOptimizer):
        optimizer.set_step(step)


# The weights that the forward pass reads on this rank, in the precision that it reads them in.


def working_weights(module: nn.Module, names: dict[int, str]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name in checkpoints, live tensor) of each parameter, shared ones once: whole, or at ZeRO 3 the share."""
    for parameter in module.parameters():
        share = getattr(parameter, "ds_tensor", None)
        yield names[id(parameter)], parameter.data if share is None else share.data


# State that every rank holds whole: DDP, one process, and ZeRO 0. Saving it is split evenly over
# the ranks.


def clip_or_drop(parameters: Sequence[Tensor], grad_clip: float, drop: bool = False) -> Update:
    """Clips the reduced gradients to a global norm, or drops them all where the norm is not finite, or `drop` is asked.

    A parameter without a gradient is left alone by every torch optimizer, moments and step count too. All ranks hold
    the same reduced gradients, so all decide alike.
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
    """Master weights and moments, whole on every rank.

    Args:
        masters: (name, fp32 parameter that the optimizer updates).
        optimizer: The torch optimizer over them.
        world: Decides which slice this rank saves.
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
        """Nothing: there is no loss scale."""
        return {}

    def finish_load(self, optimizer_step: int, scalars: dict[str, float]) -> None:
        """See `FragmentStore.finish_load`."""
        set_optimizer_step(self._optimizer, optimizer_step)
