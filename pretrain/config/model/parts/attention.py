"""Self-attention and cross attention of a block."""

from pretrain.config.model.parts import latent, sinks, values
from pretrain.config.model.parts.counts import FlopCounter, NamedWeight, RowTokens, Weights, linear
from pretrain.config.model.stack import StackConfig

GROUP = "attention"


def weights(stack: StackConfig, name: str, number: int) -> Weights:
    """Yields the projections of a layer, its norms of queries and keys, sinks and factors of values."""
    if stack.latent is not None:
        yield from latent.weights(stack, stack.latent, name)
        return
    query = stack.heads * stack.per_head_width
    key = stack.num_kv_heads * stack.per_head_width
    rows = (query, key, key)
    bias = stack.has_qkv_bias
    yield from linear(f"{name}.qkv", stack.width, sum(rows), bias, GROUP, cut="rows", fused=rows)
    yield from _norms(stack, name)
    yield from sinks.weights(stack, name)
    yield from values.weights(stack, name, number)
    yield from linear(f"{name}.output", query, stack.width, stack.has_output_bias, GROUP, cut="columns")


def _norms(stack: StackConfig, name: str) -> Weights:
    if not stack.qk_norm:
        return
    for norm, heads in (("query_norm", stack.heads), ("key_norm", stack.num_kv_heads)):
        yield NamedWeight(f"{name}.{norm}.weight", (stack.qk_norm_width(heads),), "norm")
        if stack.has_qk_norm_bias:
            yield NamedWeight(f"{name}.{norm}.bias", (stack.qk_norm_width(heads),), "norm")


def cross_weights(stack: StackConfig, name: str) -> Weights:
    """Yields the projections of attention to the output of an encoder."""
    query = stack.heads * stack.per_head_width
    key = stack.num_kv_heads * stack.per_head_width
    rows = (key, key)
    bias = stack.has_qkv_bias
    yield from linear(f"{name}.query", stack.width, query, bias, GROUP, cut="rows")
    yield from linear(f"{name}.key_value", stack.width, sum(rows), bias, GROUP, cut="rows", fused=rows)
    yield from linear(f"{name}.output", query, stack.width, stack.has_output_bias, GROUP, cut="columns")


def pairs(count: FlopCounter, stack: StackConfig, number: int, tokens: int, *, causal: bool) -> int:
    """Returns the pairs of query and key of a row: its edges count as the rest."""
    windows = [window for window in (stack.windows[number], count.window) if window is not None]
    reach = tokens
    if windows:
        reach = min(windows) if causal else 2 * min(windows) - 1
    return tokens * min(tokens, reach)


def flops(
    count: FlopCounter, stack: StackConfig, name: str, tokens: int, pairs: int, reads: bool, bias: bool, mixed: bool
) -> tuple[bool, bool]:
    """Adds self-attention; returns also if its own values have a gradient.

    Args:
        count: Counter of the model.
        stack: Section of the stack.
        name: Name of the layer.
        tokens: Tokens of a row.
        pairs: Pairs of query and key.
        reads: The input has a gradient.
        bias: The bias of the scores has one.
        mixed: Values that are mixed with its own have one.
    """
    if stack.latent is not None:
        return latent.flops(count, stack, stack.latent, name, tokens, pairs, reads), False
    made = count.linear(f"{name}.qkv", tokens, reads)
    query = made or count.has(f"{name}.query_norm.weight")
    key = made or count.has(f"{name}.key_norm.weight")
    value = made or mixed or count.has(f"{name}.value_mix")
    result = count.mix(stack.heads * stack.per_head_width * pairs, query, key, value, bias)
    return count.linear(f"{name}.output", tokens, result), made


def cross_flops(count: FlopCounter, stack: StackConfig, name: str, row: RowTokens, reads: bool) -> bool:
    """Adds attention to the output of an encoder."""
    source = row.source or 0
    query = count.linear(f"{name}.query", row.tokens, reads)
    key = count.linear(f"{name}.key_value", source, row.is_encoded)
    mixed = count.mix(stack.heads * stack.per_head_width * row.tokens * source, query, key, key)
    return count.linear(f"{name}.output", row.tokens, mixed)
