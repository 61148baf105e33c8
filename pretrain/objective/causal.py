"""Next-token prediction: `targets_BT` holds, at each position, the token that follows."""

from pretrain.objective.contract import LossOutput, Model
from pretrain.objective.loss import linear_cross_entropy
from pretrain.types import IGNORE_INDEX, Batch


def causal_loss(model: Model, batch: Batch) -> LossOutput:
    """Cross-entropy of every target, summed. Positions without one (IGNORE_INDEX) add nothing."""
    hidden_BTD = model(batch, logits=False).hidden_BTD
    loss_sum = model.head(
        hidden_BTD,
        lambda hidden, weight, bias: linear_cross_entropy(
            hidden, weight, batch.targets_BT, vocab_size=model.vocab_size, bias_V=bias
        ),
    )
    return LossOutput(loss_sum, (batch.targets_BT != IGNORE_INDEX).sum())
