"""What an objective is: rows of tokens into rows for a model, and a loss of what the model makes of them.

    TokenRows or PairRows  --make_rows-->  ModelRows       numpy, in the loader's threads, a pure function
    Model, Batch           --loss------->  LossOutput      torch, inside the module that the engine wraps

Nothing here, nor what makes rows, imports torch: looking at data does without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from pretrain.config.lengths import RowLengths
from pretrain.config.objective import ObjectiveConfig, TaskConfig
from pretrain.objective.loss import TokenLoss, linear_cross_entropy
from pretrain.rows import ModelRows, PairRows, TokenRows, Vocabulary
from pretrain.types import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from pretrain.types import Batch, ModelOutput


class Model(Protocol):
    """A model that an objective can train.

    Its `head` is called as `head(hidden_BTD, loss)` and returns `loss(hidden_BTD, weight_VD, bias_V)`, evaluated inside
    the head's own forward: an engine that shards weights (ZeRO stage 3) has gathered the head's there, and only there.
    Its `num_scores` are the rows of that weight that are no padding.
    """

    head: Any

    def __call__(self, batch: "Batch", *, logits: bool) -> "ModelOutput":
        """Reads a batch; with `logits=False` hidden states only."""


class LossOutput(NamedTuple):
    """The loss of one micro-batch, before the division that makes it a mean over the global batch.

    Attributes:
        loss_sum: Scalar fp32, differentiable: what is minimised, summed over the targets.
        nll_sum: Scalar fp32, detached: -log p(target) summed, what is shown and compared.
        num_correct: Scalar int64: targets that the model holds for the likeliest.
        nll_P: fp32, detached: the summands of `nll_sum`, at `Batch.target_positions_P` or at every position of
            `targets_BT`; 0 where there is no target. None: not available, and then no loss by source is logged.
    """

    loss_sum: "Tensor"
    nll_sum: "Tensor"
    num_correct: "Tensor"
    nll_P: "Tensor | None" = None


RowMaker = Callable[[TokenRows | PairRows], ModelRows]

Loss = Callable[[Model, "Batch"], LossOutput]


@dataclass(frozen=True, slots=True)
class RowContext:
    """What making rows needs beside the rows.

    Attributes:
        seed: Of the run: corruption depends on it and a row's sample id, on nothing else.
        vocabulary: Of the tokenizer.
        lengths: What the rows have, and what is made of them must have.
        num_stacks: Of the model: 1 or 2.
        document_mask: Documents of a row do not see each other, and do not predict each other.
    """

    seed: int
    vocabulary: Vocabulary
    lengths: RowLengths
    num_stacks: int = 1
    document_mask: bool = True


def token_loss(config: ObjectiveConfig) -> Loss:
    """Returns the loss of objectives that predict tokens."""

    return build_token_loss(config)


@dataclass(frozen=True, slots=True)
class ObjectiveKind:
    """An entry of the registry.

    Attributes:
        build_rows: Returns what makes its rows. Raises: ConfigError: The tokenizer lacks a token that it needs.
        build_loss: Returns its loss.
    """

    build_rows: Callable[[TaskConfig, RowContext], RowMaker]
    build_loss: Callable[[ObjectiveConfig], Loss] = token_loss


# The loss of every objective that predicts tokens or labels: cross-entropy at the positions that
# have a target.


def build_token_loss(config: ObjectiveConfig) -> Loss:
    """Returns the loss with the smoothing and the z-loss of a config."""

    def loss(model: Model, batch: Batch) -> LossOutput:
        return sum_token_loss(model, batch, config.label_smoothing, config.z_loss)

    return loss


def sum_token_loss(model: Model, batch: Batch, label_smoothing: float = 0.0, z_loss: float = 0.0) -> LossOutput:
    """Sums the cross-entropy of every target. Positions without one (IGNORE_INDEX) add nothing.

    Where `batch.target_positions_P` names the few positions that have a target, the head reads these only.
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
