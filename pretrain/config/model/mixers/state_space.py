"""Mamba-2 in the place of attention (`model.decoder.mixers`)."""

from pretrain.config.model.mixers.chunks import chunks_of
from pretrain.config.model.parts.attention import copies_of_heads
from pretrain.config.model.parts.counts import (
    STATISTIC,
    FlopCounter,
    Kept,
    MicroBatch,
    NamedWeight,
    Weights,
    linear,
)
from pretrain.config.model.stack import StackConfig
from pretrain.kinds.mixers.mamba2 import Mamba2Sizes


def _sizes(stack: StackConfig) -> Mamba2Sizes:
    return stack.mamba2.sizes(stack.width, stack.heads)


def weights(stack: StackConfig, name: str) -> Weights:
    """Yields the projections, the short convolution, decays and the norm of results."""
    group = "attention"
    sizes = _sizes(stack)
    for vector in ("a_log", "dt_bias", "skip"):
        yield NamedWeight(f"{name}.{vector}", (sizes.heads,), group)
    fused = sizes.fused
    yield from linear(f"{name}.input", stack.width, sum(fused), sizes.bias, group, cut="rows", fused=fused)
    channels = sum(sizes.rows)
    yield NamedWeight(f"{name}.convolution.weight", (channels, sizes.kernel), group)
    if sizes.filter_bias:
        yield NamedWeight(f"{name}.convolution.bias", (channels,), group)
    yield NamedWeight(f"{name}.norm", (sizes.inner,), "norm")
    yield from linear(f"{name}.output", sizes.inner, stack.width, sizes.bias, group, cut="columns")


def flops(count: FlopCounter, stack: StackConfig, name: str, tokens: int, reads: bool) -> bool:
    """Adds a layer: in a chunk all pairs of tokens, and between chunks products with the state."""
    sizes = _sizes(stack)
    gated = count.linear(f"{name}.input", tokens, reads)
    mixed = gated or count.has(f"{name}.convolution.weight", f"{name}.convolution.bias")
    made = mixed or count.has(f"{name}.a_log", f"{name}.dt_bias")
    chunks, chunk = chunks_of(tokens)
    pairs = chunks * chunk * chunk
    count.add("attention", pairs * sizes.groups * sizes.state_width, 2 * mixed)
    count.add("attention", pairs * sizes.inner, 2 * made)
    states = chunk * sizes.inner * sizes.state_width
    # The first state is zero, and none is made after the last chunk.
    count.add("attention", states * 2 * (chunks - 1), 2 * made)
    count.add("attention", states, made)
    result = made or count.has(f"{name}.skip", f"{name}.norm")
    return count.linear(f"{name}.output", tokens, result)


def kept(batch: MicroBatch, stack: StackConfig) -> Kept:
    """Counts a token; the rule is in fp32 at least, and keeps the state before each chunk."""
    exact = max(4, batch.compute)
    sizes = _sizes(stack)
    mixed, inner, heads = sum(sizes.rows), sizes.inner, sizes.heads
    chunks, chunk = chunks_of(batch.length)
    states = inner * sizes.state_width // chunk
    # Before and after the convolution and SiLU; steps and their softplus.
    read = 2 * mixed * batch.compute + (mixed + 2 * heads) * exact
    # Values in three forms, keys and queries in one; three of all pairs of a chunk, one of a group.
    vectors = 3 * inner + 2 * sizes.groups * sizes.state_width
    # Nothing is written behind the last chunk.
    vectors -= inner // chunks
    rule = vectors + (2 * heads + sizes.groups) * chunk + 3 * heads + states
    rule = rule * exact * chunks * chunk // batch.length  # the last chunk is filled up
    gated = inner * (batch.compute * 2 + 4 * exact) + STATISTIC * sizes.groups
    made = (sum(sizes.fused) + stack.width) * batch.compute
    made += (sizes.groups * chunk + 2 * inner + states) * exact
    return Kept(read + rule + gated, made)


def num_values(stack: StackConfig) -> int:
    """Returns the values of a layer's projections, of which autocast makes copies."""
    sizes = _sizes(stack)
    return stack.width * (sum(sizes.fused) + sizes.inner)


def exchanged(batch: MicroBatch, stack: StackConfig) -> tuple[int, int]:
    """Returns bytes a token of values, copies of keys and queries, and steps; and of results, which are exact."""
    sizes = _sizes(stack)
    heads, groups = sizes.heads // batch.tensor, sizes.groups // batch.tensor
    copies = copies_of_heads(heads, groups, batch.sequence)
    sent = sizes.inner + copies * sum(sizes.rows[1:]) + sizes.heads
    return sent * batch.compute, sizes.inner * max(4, batch.compute)


def widest(stack: StackConfig) -> int:
    """Returns the columns of the input's projection."""
    return sum(_sizes(stack).fused)
