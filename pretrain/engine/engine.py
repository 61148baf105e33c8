"""The engine: one interface over accelerate, DeepSpeed and DDP, and the check that what runs is what was asked for.

    start_accelerator (start.py)  ->  build_engine  ->  step of micro-batches: forward_backward ... then update

The loss that goes in is a sum over this rank's target tokens times a scale; what comes out is the gradient of the
token mean over the global batch, because every engine averages over the ranks and the scale is
`world_size / global targets`.

Deliberately not here: data (accelerate would re-shard a loader), checkpoints (the engine only yields fragments), and
the learning-rate schedule (a pure function of the step that the loop evaluates).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from pretrain.types import Batch, FragmentStore

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class Update:
    """What an optimizer step did.

    Attributes:
        grad_norm: Global L2 norm of the gradient before clipping; not finite if the step was skipped.
        skipped: Whether weights and moments were left alone because the gradient was not finite.
    """

    grad_norm: float
    skipped: bool


class Engine(Protocol):
    """A model and an optimizer, distributed.

    Attributes:
        device: Where batches go.
        description: What runs, for people.
        module: What is trained, without wrappers.
        is_sharded: Whether a rank holds a share of the weights only (ZeRO 3).
    """

    device: torch.device
    description: str
    module: nn.Module
    is_sharded: bool

    @property
    def state(self) -> FragmentStore:
        """Weights and moments, for checkpoints."""
        ...

    def forward_backward(self, batch: Batch, scale: float, is_last: bool) -> Tensor:
        """Runs one micro-batch and accumulates the gradient of `scale x (sum of its losses)`.

        Args:
            batch: Tensors on `device`.
            scale: World size over the number of target tokens of the global batch.
            is_last: Whether this is the last micro-batch of the step; gradients are then reduced over the ranks.

        Returns:
            What the module shows of it: float64 [2], the sum of -log p(target) and the number of targets held for the
            likeliest.
        """
        ...

    def update(self, learning_rate: float, drop: bool = False) -> Update:
        """Clips, applies the optimizer, clears the gradients. A non-finite gradient changes nothing on any rank.

        Args:
            learning_rate: Of this step.
            drop: Change nothing whatever the gradient is. The same on every rank.
        """
        ...

    def evaluate(self, batch: Batch) -> Tensor:
        """Returns the same without gradient or dropout. Collective under ZeRO 3."""
        ...

    def rehearse(self, batch: Batch) -> None:
        """Runs a micro-batch forward as in training, dropout and all, without gradient. Collective under ZeRO 3."""
        ...

    def working_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, live tensor) of what the forward pass reads on this rank; at ZeRO 3 this rank's shares."""
        ...
