"""Frozen parameters as part of the checkpointed state: weights without moments and without an fp32 master copy.

fp32 working weights   saved and loaded in place
bf16, fp16             converted to fp32 while saving or loading; the round trip is exact
ZeRO 3                 this rank's share; otherwise whole on every rank, and each rank saves an even part
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pretrain.dist import World
from pretrain.types import Fragment, FragmentStore


class CompleteState:
    """The state of an engine together with the frozen parameters.

    Args:
        trained: State of the trained parameters.
        frozen: (name in checkpoints, working parameter).
        world: Rank and world size.
    """

    def __init__(self, trained: FragmentStore, frozen: list[tuple[str, Tensor]], world: World) -> None:
        self._trained, self._frozen, self._world = trained, frozen, world
        self._filled: list[tuple[Tensor, Tensor]] = []

    def held_fragments(self) -> Iterator[Fragment]:
        """Yields the trained state, and this rank's part of the frozen parameters."""
        yield from self._trained.held_fragments()
        self._filled = []
        for name, parameter in self._frozen:
            live, offset, shape = self._place(parameter)
            if live.numel():
                weight = live if live.dtype == torch.float32 else live.float()
                self._filled += [] if weight is live else [(live, weight)]
                yield Fragment(name, offset, shape, {"weight": weight})

    def owned_fragments(self) -> Iterator[Fragment]:
        """Yields the fragments that this rank saves."""
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
        """Returns this rank's part of a parameter, flat, its offset, and the shape of the whole parameter."""
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
        """Copies loaded values to working weights, before the engine gathers small parameters again (ZeRO 3)."""
        for live, weight in self._filled:
            live.copy_(weight)
        self._filled = []
        self._trained.finish_load(optimizer_step, scalars)
