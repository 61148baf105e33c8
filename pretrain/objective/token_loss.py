"""The loss of every objective that predicts tokens or labels: cross-entropy at the positions that have a target."""

from torch import Tensor

from pretrain.config.objective import ObjectiveConfig
from pretrain.objective.contract import Loss, LossOutput, Model
from pretrain.objective.loss import TokenLoss, linear_cross_entropy
from pretrain.types import Batch


def build_token_loss(config: ObjectiveConfig) -> Loss:
    """Returns the loss with the smoothing and the z-loss of a config."""

    def loss(model: Model, batch: Batch) -> LossOutput:
        return sum_token_loss(model, batch, config.label_smoothing, config.z_loss)

    return loss


def sum_token_loss(model: Model, batch: Batch, label_smoothing: float = 0.0, z_loss: float = 0.0) -> LossOutput:
    """Sums the cross-entropy of every target. Positions without one (IGNORE_INDEX) add nothing.

    Where `batch.places_P` names the few positions that have a target, the head reads these only.
    """
    hidden_BTD, targets_BT = model(batch, logits=False).hidden_BTD, batch.targets_BT
    if batch.places_P is not None:
        hidden_BTD = hidden_BTD.flatten(0, 1).index_select(0, batch.places_P)
        targets_BT = targets_BT.flatten().index_select(0, batch.places_P)

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
