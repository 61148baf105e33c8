"""Counts of the parts of a model, one file a part: parameters, FLOPs, bytes kept for the backward pass."""

from pretrain.config.model import AnyModelConfig, RecurrentConfig
from pretrain.config.model.parts.recurrent import RecurrentCounts
from pretrain.config.model.parts.transformer import TransformerCounts

ModelCounts = TransformerCounts | RecurrentCounts


def counts_of(model: AnyModelConfig) -> ModelCounts:
    """Returns the counts of a model. Its vocabulary, and the labels of a head of labels, must be known."""
    return RecurrentCounts(model) if isinstance(model, RecurrentConfig) else TransformerCounts(model)
