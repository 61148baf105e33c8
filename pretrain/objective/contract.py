"""Interface of an objective, and the loss of all objectives here: cross-entropy at the positions that have a target.

TokenRows or PairRows  --make_rows-->  ModelRows       numpy, in the loader's threads, a pure function
Model, Batch           --loss------->  LossOutput      torch, inside the module that the engine wraps
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from pretrain.config.lengths import RowLengths
from pretrain.config.objective import ObjectiveConfig, TaskConfig
from pretrain.objective.loss import TokenLoss, linear_cross_entropy
from pretrain.rows import ModelRows, PairRows, TokenRows, Vocabulary
from pretrain.types import Batch, ModelOutput


class Model(Protocol):
    """A model that an objective can train.

    `head(hidden_BTD, loss)` returns `loss(hidden_BTD, weight_VD, bias_V)`, evaluated inside of the head's forward: only
    there are the head's weights gathered under ZeRO stage 3. `head.num_scores` is the number of rows of the weight,
    without padding.
    """

    head: Any

    def __call__(self, batch: Batch, *, logits: bool) -> ModelOutput:
        """Runs a batch; with `logits=False` returns hidden states only."""


class LossOutput(NamedTuple):
    """Loss of one micro-batch, summed: the division by the targets of the global batch comes later.

    Attributes:
        loss_sum: Scalar fp32, differentiable: the minimised loss, summed over the targets.
        nll_sum: Scalar fp32, detached: -log p(target), summed: the loss of logs and evaluations.
        num_correct: Scalar int64: targets with the largest score.
        nll_P: fp32, detached: the summands of `nll_sum`, at `Batch.target_positions_P` or at every position of
            `targets_BT`; 0 where there is no target. None: not available, and then no loss by source is logged.
    """

    loss_sum: Tensor
    nll_sum: Tensor
    num_correct: Tensor
    nll_P: Tensor | None = None


RowMaker = Callable[[TokenRows | PairRows], ModelRows]
Loss = Callable[[Model, Batch], LossOutput]


@dataclass(frozen=True, slots=True)
class RowContext:
    """Settings of a row maker.

    Attributes:
        seed: Seed of the run; corruption depends on it and on the sample id of a row only.
        vocabulary: Special tokens and size of the tokenizer.
        lengths: Lengths of raw rows and of model rows.
        num_stacks: Stacks of the model: 1 or 2.
        document_mask: Documents of a row neither attend to nor predict each other.
    """

    seed: int
    vocabulary: Vocabulary
    lengths: RowLengths
    num_stacks: int = 1
    document_mask: bool = True


def token_loss(config: ObjectiveConfig) -> Loss:
    """Returns the cross-entropy loss with the label smoothing and the z-loss of a config."""

    def loss(model: Model, batch: Batch) -> LossOutput:
        return sum_token_loss(model, batch, config.label_smoothing, config.z_loss)

    return loss


@dataclass(frozen=True, slots=True)
class ObjectiveKind:
    """An entry of the registry.

    Attributes:
        build_rows: Builds its row maker. Raises: ConfigError: The tokenizer lacks a required token.
        build_loss: Builds its loss.
    """

    build_rows: Callable[[TaskConfig, RowContext], RowMaker]
    build_loss: Callable[[ObjectiveConfig], Loss] = token_loss


def sum_token_loss(model: Model, batch: Batch, label_smoothing: float = 0.0, z_loss: float = 0.0) -> LossOutput:
    """Sums the cross-entropy of every target. Positions without one (IGNORE_INDEX) add nothing.

    If `batch.target_positions_P` lists the few positions with a target, the head reads these only.
    """
    hidden_BTD, targets_BT = model(batch, logits=False).hidden_BTD, batch.targets_BT
    if batch.target_positions_P is not None:
        hidden_BTD = hidden_BTD.flatten(0, 1).index_select(0, batch.target_positions_P)
        targets_BT = targets_BT.flatten().index_select(0, batch.target_positions_P)

    def head_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> TokenLoss:
        return linear_cross_entropy(
            hidden,
            weight,
            targets_BT,
            vocab_size=model.head.num_scores,
            bias_V=bias,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            soft_cap=model.head.soft_cap,
        )

    return LossOutput(*model.head(hidden_BTD, head_loss))
