"""Parameters that no optimizer steps, as part of the state: weights without moments, and without an fp32 copy.

fp32 working weights   themselves: saved, and filled when loading
bf16, fp16             as fp32 for as long as it takes to save or load; the round trip is exact
ZeRO 3                 this rank's share; else they are whole on every rank, and each saves an even part
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pretrain.dist import World
from pretrain.types import Fragment, FragmentStore


class CompleteState:
    """The state of an engine, and the frozen parameters that it leaves out.

    Args:
        trained: What the engine keeps of the others.
        frozen: (name in checkpoints, working parameter).
        world: This process's place.
    """

    def __init__(self, trained: FragmentStore, frozen: list[tuple[str, Tensor]], world: World) -> None:
        self._trained, self._frozen, self._world = trained, frozen, world
        self._filled: list[tuple[Tensor, Tensor]] = []

    def held_fragments(self) -> Iterator[Fragment]:
        """Yields what the engine keeps, and all that this rank has of the frozen parameters."""
        yield from self._trained.held_fragments()
        self._filled = []
        for name, parameter in self._frozen:
            live, offset, shape = self._place(parameter)
            if live.numel():
                weight = live if live.dtype == torch.float32 else live.float()
                self._filled += [] if weight is live else [(live, weight)]
                yield Fragment(name, offset, shape, {"weight": weight})

    def owned_fragments(self) -> Iterator[Fragment]:
        """Yields what this rank saves."""
        yield from self._trained.owned_fragments()
        rank, size = self._world.rank, self._world.size
        for name, parameter in self._frozen:
            live, offset, shape = self._place(parameter)
            if not hasattr(parameter, "ds_tensor"):
                offset, end = live.numel() * rank // size, live.numel() * (rank + 1) // size
                live = live[offset:end]
            if live.numel():
                yield Fragment(name, offset, shape, {"weight": live.float()})

    def _place(self, parameter: Any) -> tuple[Tensor, int, tuple[int, ...]]:
        """Returns what this rank has of a parameter, flat, where that begins, and the shape of the whole."""
        if not hasattr(parameter, "ds_tensor"):
            return parameter.data.view(-1), 0, tuple(parameter.shape)
        share = parameter.ds_tensor.ds_numel
        offset = self._world.rank * share
        length = max(0, min(share, parameter.ds_numel - offset))
        return parameter.ds_tensor.data[:length], offset, tuple(parameter.ds_shape)

    def scalars(self) -> dict[str, float]:
        """See `FragmentStore.scalars`."""
        return self._trained.scalars()

    @torch.no_grad()
    def finish_load(self, optimizer_step: int, scalars: dict[str, float]) -> None:
        """Copies what was filled; first, because at ZeRO 3 the engine then gathers small parameters again."""
        for live, weight in self._filled:
            live.copy_(weight)
        self._filled = []
        self._trained.finish_load(optimizer_step, scalars)
