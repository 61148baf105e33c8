"""Norms of a stack (`model.decoder.norm` and the keys beside it)."""

from pretrain.config.model.parts.counts import STATISTIC, MicroBatch, NamedWeight, Weights
from pretrain.config.model.stack import StackConfig


def weights(stack: StackConfig, name: str, width: int | None = None, group: str = "norm") -> Weights:
    """Yields the weight and bias of a norm of the stack's width or another."""
    if stack.norm != "unweighted":
        yield NamedWeight(f"{name}.weight", (width or stack.width,), group)
    if stack.has_norm_bias:
        yield NamedWeight(f"{name}.bias", (width or stack.width,), group)


def kept(batch: MicroBatch, stack: StackConfig, width: int = 0) -> int:
    """Returns bytes a token that a norm of the stack's or another width keeps: its input and statistics."""
    # RMSNorm step by step: its input and what it divided, in fp32; with an offset: a copy in fp32.
    is_layer = stack.norm != "rms"
    each = 4 if stack.norm_offset and not batch.on_cpu else batch.residual
    if batch.on_cpu and not is_layer:
        each = 8
    return (width or stack.width) * each + STATISTIC * (1 + is_layer)
