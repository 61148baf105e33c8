"""Self-attention and cross attention of a block."""

from pretrain.config.model.parts import latent, sinks, values
from pretrain.config.model.parts.counts import NamedWeight, Weights, linear
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
