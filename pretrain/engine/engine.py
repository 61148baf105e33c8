"""The engine: one interface over accelerate, DeepSpeed and DDP.

    start_accelerator, build_engine (build.py)
    a step: forward_backward of each micro-batch, then update

The input of `forward_backward` is a sum of losses over this rank's target tokens and a scale. Every
engine averages gradients over the ranks, and the scale is `world_size / global targets`: the result
is the gradient of the token mean over the global batch.

Not here: data (accelerate would re-shard a loader), checkpoints (the engine only yields fragments),
and the learning-rate schedule (a pure function of the step that the loop evaluates).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from pretrain.engine.weight_average import AveragedState
from pretrain.types import Batch, FragmentStore


@dataclass(frozen=True, slots=True)
class Update:
    """Result of an optimizer step.

    Attributes:
        grad_norm: Global L2 norm of the gradient before clipping; not finite in a skipped step.
        skipped: Weights and moments are unchanged: the gradient was not finite, or was dropped.
    """

    grad_norm: float
    skipped: bool


class Engine(Protocol):
    """A model and an optimizer, distributed.

    Attributes:
        device: Device of batches.
        description: Engine, precision, ranks and offload in one line, for logs.
        module: The trained module, without wrappers.
        is_sharded: Each rank has a share of the weights only (ZeRO 3).
        needs_all_ranks: A forward pass is collective (ZeRO 3, experts or matrices over ranks).
        average: The moving average of the weights, part of `state`; None: there is none.
    """

    device: torch.device
    description: str
    module: nn.Module
    is_sharded: bool
    needs_all_ranks: bool
    average: AveragedState | None

    @property
    def state(self) -> FragmentStore:
        """Weights and moments, for checkpoints."""

    def forward_backward(self, batch: Batch, scale: float, is_last: bool) -> Tensor:
        """Runs one micro-batch and accumulates the gradient of `scale x (sum of its losses)`.

        Gradients are reduced over the ranks after the last micro-batch of a step. Returns the sum
        of -log p(target) and the number of correct targets, float64 [2].
        """

    def update(self, learning_rate: float, drop: bool = False) -> Update:
        """Clips, applies the optimizer, clears gradients; a non-finite gradient changes nothing.

        `drop` discards the gradient, even a finite one; the same on every rank.
        """

    def evaluate(self, batch: Batch) -> Tensor:
        """Returns the sums of `forward_backward`, without gradient or dropout. Collective."""

    def rehearse(self, batch: Batch) -> Tensor:
        """Returns the sums of `evaluate` in training mode, with dropout. Collective."""

    def working_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, live tensor) of the weights in the forward pass; at ZeRO 3 its shares."""
