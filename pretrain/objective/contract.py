"""What an objective asks of a model, and what it gives back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from pretrain.types import Batch, ModelOutput


class Model(Protocol):
    """A model that an objective can train.

    Its `head` is called as `head(hidden_BTD, loss)` and returns `loss(hidden_BTD, weight_VD, bias_V)`, evaluated inside
    the head's own forward: an engine that shards weights (ZeRO stage 3) has gathered the head's there, and only there.
    """

    head: Any
    vocab_size: int

    def __call__(self, batch: Batch, *, logits: bool) -> ModelOutput:
        """Reads a batch; with `logits=False` hidden states only."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The loss of one micro-batch, before the division that makes it a mean over the global batch.

    Attributes:
        loss_sum: Scalar fp32: sum of the token losses over the targets.
        num_targets: Scalar int64 on the same device: how many targets there were.
    """

    loss_sum: Tensor
    num_targets: Tensor


Objective = Callable[[Model, Batch], LossOutput]
