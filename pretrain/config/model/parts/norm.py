"""Norms of a stack (`model.decoder.norm` and the keys beside it)."""

from pretrain.config.model.parts.counts import NamedWeight, Weights
from pretrain.config.model.stack import StackConfig


def weights(stack: StackConfig, name: str, width: int | None = None, group: str = "norm") -> Weights:
    """Yields the weight and bias of a norm of the stack's width or another."""
    if stack.norm != "unweighted":
        yield NamedWeight(f"{name}.weight", (width or stack.width,), group)
    if stack.has_norm_bias:
        yield NamedWeight(f"{name}.bias", (width or stack.width,), group)
