"""Learned scores of each head beside its keys (`model.decoder.attention_sinks`)."""

from pretrain.config.model.parts.counts import NamedWeight, Weights
from pretrain.config.model.stack import StackConfig


def weights(stack: StackConfig, name: str) -> Weights:
    """Yields a score for each head."""
    if stack.attention_sinks:
        yield NamedWeight(f"{name}.sinks", (stack.heads,), "attention")
