"""State that every rank holds whole: DDP, one process, and ZeRO 0. Saving it is split evenly over the ranks."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pretrain.dist import World
from pretrain.engine.engine import Update
from pretrain.engine.moments import place_whole, set_optimizer_step, state_fragments
from pretrain.optim.pieces import Piece, Span
from pretrain.types import Fragment


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
            Piece(Span(name, slot, offset=0, start=0, length=master.numel()), tuple(master.shape), master)
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
