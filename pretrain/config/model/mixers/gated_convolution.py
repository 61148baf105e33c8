"""Short gated convolution in the place of attention (`model.decoder.mixers`)."""

from pretrain.config.model.parts.counts import (
    FlopCounter,
    Kept,
    MicroBatch,
    NamedWeight,
    Weights,
    linear,
)
from pretrain.config.model.stack import StackConfig


def weights(stack: StackConfig, name: str) -> Weights:
    """Yields the projections and the convolution."""
    sizes, width, group = stack.convolution, stack.width, "attention"
    fused = (width,) * 3
    yield from linear(f"{name}.input", width, sum(fused), sizes.bias, group, cut="rows", fused=fused)
    yield NamedWeight(f"{name}.convolution.weight", (width, sizes.kernel), group)
    if sizes.bias:
        yield NamedWeight(f"{name}.convolution.bias", (width,), group)
    yield from linear(f"{name}.output", width, width, sizes.bias, group, cut="columns")


def flops(count: FlopCounter, stack: StackConfig, name: str, tokens: int, reads: bool) -> bool:
    """Adds both projections; the convolution is no product."""
    made = count.linear(f"{name}.input", tokens, reads)
    made = made or count.has(f"{name}.convolution.weight", f"{name}.convolution.bias")
    return count.linear(f"{name}.output", tokens, made)


def kept(batch: MicroBatch, stack: StackConfig) -> Kept:
    """Counts a token: the product, the input of the convolution, its result, and the gated one."""
    return Kept(6 * stack.width * batch.compute, 4 * stack.width * batch.compute)


def num_values(stack: StackConfig) -> int:
    """Returns the values of a layer's projections, of which autocast makes copies."""
    return 4 * stack.width**2


def exchanged(batch: MicroBatch, stack: StackConfig) -> tuple[int, int]:
    """Returns bytes a token of what is convolved, and of the result."""
    return stack.width * batch.compute, stack.width * batch.compute


def widest(stack: StackConfig) -> int:
    """Returns the columns of the input's projection."""
    return 3 * stack.width
