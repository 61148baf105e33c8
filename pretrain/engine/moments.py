"""Optimizer state as an engine sees it: made before there was a first step, viewed flat, its step count set.

torch optimizers make their state in the first `step()`. Loading needs it before, and saving at step 0 too. AdamW keeps
two moments of the shape of each tensor it steps, whatever that is; an optimizer over whole matrices keeps its own, and
says where (`WholeOptimizer.fragments`).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pretrain import dist
from pretrain.optim.pieces import Piece, Span
from pretrain.optim.whole import WholeOptimizer
from pretrain.types import Fragment

MOMENTS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    WholeOptimizer: ("exp_avg", "exp_avg_sq"),  # of the groups that it steps by AdamW
}
"""The state tensors, shaped like the tensor that is stepped, of each optimizer."""


def place_whole(optimizer: torch.optim.Optimizer, masters: Sequence[Tensor], pieces: Sequence[Piece]) -> None:
    """Tells an optimizer over whole matrices where they are: each whole on every rank."""
    if isinstance(optimizer, WholeOptimizer):
        optimizer.place(masters, pieces, [[piece.span for piece in pieces]], rank=0)


def place_cut(optimizer: torch.optim.Optimizer, masters: Sequence[Tensor], pieces: Sequence[Piece], rank: int) -> None:
    """Tells an optimizer over whole matrices where they are: cut over the ranks. Collective."""
    if isinstance(optimizer, WholeOptimizer):
        gathered = dist.gather_objects([piece.span for piece in pieces])
        optimizer.place(masters, pieces, [[Span(*values) for values in spans] for spans in gathered], rank)


def state_fragments(optimizer: torch.optim.Optimizer, pieces: Sequence[Piece]) -> Iterator[Fragment]:
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
