"""Gated delta rule in the place of attention (`model.decoder.mixers`)."""

from pretrain.config.model.mixers.chunks import chunks_of
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
from pretrain.kinds.mixers.delta import DeltaSizes


def _sizes(stack: StackConfig) -> DeltaSizes:
    return stack.delta.sizes(stack.width, stack.heads)


def weights(stack: StackConfig, name: str) -> Weights:
    """Yields the projections, the short convolution, decays and the norm of results."""
    group = "attention"
    sizes = _sizes(stack)
    rows, value_heads = sizes.rows, sizes.value_heads
    rates = (value_heads, value_heads)
    for vector in ("a_log", "dt_bias"):
        yield NamedWeight(f"{name}.{vector}", (value_heads,), group)
    fused = sizes.fused
    yield from linear(f"{name}.qkv_gate", stack.width, sum(fused), False, group, cut="rows", fused=fused)
    yield NamedWeight(f"{name}.convolution.weight", (sum(rows), sizes.kernel), group)
    yield from linear(f"{name}.rates", stack.width, sum(rates), False, group, cut="rows", fused=rates)
    yield NamedWeight(f"{name}.norm.weight", (sizes.value_width,), "norm")
    yield from linear(f"{name}.output", rows[-1], stack.width, False, group, cut="columns")


def flops(count: FlopCounter, stack: StackConfig, name: str, tokens: int, reads: bool) -> bool:
    """Adds a layer: in a chunk all pairs of tokens, and between chunks products with the state."""
    gated = count.linear(f"{name}.qkv_gate", tokens, reads)
    mixed = gated or count.has(f"{name}.convolution.weight")
    rates = count.linear(f"{name}.rates", tokens, reads)
    rates = rates or count.has(f"{name}.a_log", f"{name}.dt_bias")
    sizes = _sizes(stack)
    heads, key, value = sizes.value_heads, sizes.key_width, sizes.value_width
    chunks, chunk = chunks_of(tokens)
    pairs = chunks * chunk * chunk
    made = mixed or rates
    count.add("attention", pairs * sizes.heads * 2 * key, 2 * mixed)  # of keys, and of queries and keys
    # The solution of a chunk's system, and results within it.
    count.add("attention", pairs * heads * (key + 2 * value), 2 * made)
    # Nothing is before the first chunk, and no state is made after the last.
    count.add("attention", heads * chunk * key * value * 3 * (chunks - 1), 2 * made)
    return count.linear(f"{name}.output", tokens, made or gated or count.has(f"{name}.norm.weight"))


def kept(batch: MicroBatch, stack: StackConfig) -> Kept:
    """Counts a token; the rule is in fp32 at least, and keeps the state before each chunk."""
    exact = max(4, batch.compute)
    sizes = _sizes(stack)
    heads, value_heads, key, value = sizes[:4]
    rows, results = sum(sizes.rows), value_heads * value
    chunks, chunk = chunks_of(batch.length)
    states = value_heads * key * value * (chunks - 1) // (chunks * chunk)
    # Inputs of the convolution and of SiLU; norms of queries and keys; decays and strengths.
    read = 2 * rows * batch.compute + (rows + 4 * heads + 4 * value_heads) * exact
    # Of each head values in two forms, keys in one, four of all pairs of a chunk; of groups two.
    vectors = value_heads * (key + 2 * value + 4 * chunk) + 2 * heads * (key + chunk)
    # What is read of a state and written to one; nothing of the first chunk loses any of its values.
    vectors += value_heads * (2 * key * (chunks > 1) + value * (chunks - 1) // chunks)
    rule = (vectors + 5 * value_heads + states) * exact
    rule = rule * chunks * chunk // batch.length  # the last chunk is filled up
    gated = results * (5 * batch.compute + batch.exact * batch.on_cpu) + STATISTIC * value_heads
    made = (rows + 2 * value_heads + results + stack.width) * batch.compute
    made += (2 * heads * chunk + 3 * results + states) * exact
    return Kept(read + rule + gated, made)


def num_values(stack: StackConfig) -> int:
    """Returns the values of a layer's projections, of which autocast makes copies."""
    sizes = _sizes(stack)
    return stack.width * (sum(sizes.rows) + 2 * sizes.value_heads + 2 * sizes.rows[-1])


def exchanged(batch: MicroBatch, stack: StackConfig) -> tuple[int, int]:
    """Returns bytes a token of queries, keys, values and rates, and of results, which are exact."""
    sizes = _sizes(stack)
    sent = sum(sizes.rows) + 2 * sizes.value_heads
    return sent * batch.compute, sizes.rows[-1] * max(4, batch.compute)


def widest(stack: StackConfig) -> int:
    """Returns the columns of queries, keys, values and gates."""
    return sum(_sizes(stack).fused)
