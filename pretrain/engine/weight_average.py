"""An exponential moving average of the weights in training: the value `ema` of each fragment, in fp32.

    after an update     average <- decay x average + (1 - decay) x weight, on the masters of this rank
    in a checkpoint     `<parameter>/ema@<offset>`, beside the weight and its moments
    for an evaluation   weights and averages change places, and the working weights follow them

It lies where the engine keeps the masters, cut like them, so that a step gathers nothing, and any
ranks and any ZeRO stage continue it. Frozen parameters have none: they are their own average. Not
here: the decay (`EmaConfig.decay`), which is a function of the step.
"""

import contextlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from pretrain.types import EMA, Fragment, FragmentStore

_PIECE = 2**24
"""Elements that change places at once, through a copy of 64 MiB."""


class AveragedState:
    """The state of an engine with an average of its weights, which begins at the present ones."""

    def __init__(self, trained: FragmentStore) -> None:
        self._trained = trained
        self._weights: list[Tensor] = []
        self._averages: list[Tensor] = []
        # Offset and average of each piece on this rank, of a parameter by offset.
        self._by_name: dict[str, list[tuple[int, Tensor]]] = {}
        for fragment in trained.held_fragments():
            if "weight" in fragment.tensors:
                weight = fragment.tensors["weight"]
                average = weight.detach().clone()
                self._weights.append(weight)
                self._averages.append(average)
                self._by_name.setdefault(fragment.name, []).append((fragment.offset, average))

    def follow(self, decay: float) -> None:
        """Moves the average towards the weights of an update; not collective."""
        if self._weights:  # a rank of many may have no piece of a small model
            get_ema_multi_avg_fn(decay)(self._averages, self._weights, 0)

    @contextlib.contextmanager
    def exchanged(self, optimizer_step: int) -> Iterator[None]:
        """Context in which the weights are the averages, for evaluation. Collective.

        An error within ends the run: nothing changes places again, as other ranks may be gone.
        """
        self._exchange(optimizer_step)
        yield
        self._exchange(optimizer_step)

    @torch.no_grad()
    def _exchange(self, optimizer_step: int) -> None:
        for weight, average in zip(self._weights, self._averages, strict=True):
            for first, second in zip(weight.split(_PIECE), average.split(_PIECE), strict=True):
                copy = first.clone()
                first.copy_(second)
                second.copy_(copy)
        self.finish_load(optimizer_step, self.scalars())

    def _complete(self, fragment: Fragment) -> Fragment:
        if "weight" not in fragment.tensors:  # state of a whole matrix
            return fragment
        pieces = self._by_name[fragment.name]
        offset, average = pieces[bisect_right(pieces, fragment.offset, key=lambda piece: piece[0]) - 1]
        run, stride = fragment.stripes or (1, 1)
        piece = average.narrow(0, (fragment.offset - offset) // stride * run, fragment.length)
        return replace(fragment, tensors=fragment.tensors | {EMA: piece})

    def held_fragments(self) -> Iterator[Fragment]:
        """See `FragmentStore.held_fragments`."""
        return map(self._complete, self._trained.held_fragments())

    def owned_fragments(self) -> Iterator[Fragment]:
        """See `FragmentStore.owned_fragments`."""
        return map(self._complete, self._trained.owned_fragments())

    def scalars(self) -> dict[str, float]:
        """See `FragmentStore.scalars`."""
        return self._trained.scalars()

    def finish_load(self, optimizer_step: int, scalars: dict[str, float]) -> None:
        """See `FragmentStore.finish_load`."""
        self._trained.finish_load(optimizer_step, scalars)
