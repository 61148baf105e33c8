"""Self-attention and cross attention of a block."""

from math import gcd

from pretrain.config.model.parts import latent, position, sinks, values
from pretrain.config.model.parts.counts import (
    STATISTIC,
    FlopCounter,
    Kept,
    MicroBatch,
    NamedWeight,
    RowTokens,
    Weights,
    linear,
)
from pretrain.config.model.stack import StackConfig

GROUP = "attention"

_TILE = 128
"""Queries of a tile where attention runs tile by tile (`model/backends/sdpa.py`)."""


def weights(stack: StackConfig, name: str, number: int) -> Weights:
    """Yields the projections of a layer, its norms of queries and keys, sinks and factors of values."""
    if stack.latent is not None:
        yield from latent.weights(stack, stack.latent, name)
        return
    query = stack.heads * stack.per_head_width
    key = stack.num_kv_heads * stack.per_head_width
    rows = (query, key, key, query)[: 3 + stack.attention_gate]
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
    result = result or (made and stack.attention_gate)
    return count.linear(f"{name}.output", tokens, result), made


def cross_flops(count: FlopCounter, stack: StackConfig, name: str, row: RowTokens, reads: bool) -> bool:
    """Adds attention to the output of an encoder."""
    source = row.source or 0
    query = count.linear(f"{name}.query", row.tokens, reads)
    key = count.linear(f"{name}.key_value", source, row.is_encoded)
    mixed = count.mix(stack.heads * stack.per_head_width * row.tokens * source, query, key, key)
    return count.linear(f"{name}.output", row.tokens, mixed)


def copies_of_heads(heads: int, kv_heads: int, ranks: int) -> int:
    """Returns how often each key-value head is sent, where `ranks` share rows and the query heads.

    A copy serves as many query heads as divide both the number of a rank and that of a key-value head.
    """
    group = heads // kv_heads
    return group // gcd(heads // ranks, group)


def _is_tiled(batch: MicroBatch, stack: StackConfig) -> bool:
    """Returns True if a CPU has no kernel for it: attention then runs tile by tile."""
    has_no_kernel = stack.attention_weight_dropout > 0 or stack.score_cap is not None
    return batch.on_cpu and has_no_kernel


def _widths(batch: MicroBatch, stack: StackConfig) -> tuple[int, int]:
    head = stack.per_head_width * batch.compute
    return stack.heads * head, stack.num_kv_heads * head


def projected(batch: MicroBatch, stack: StackConfig) -> int:
    """Returns bytes a token of queries, keys, values and gates as one product makes them."""
    query, key = _widths(batch, stack)
    return (1 + stack.attention_gate) * query + 2 * key


def kept(batch: MicroBatch, stack: StackConfig, number: int) -> Kept:
    """Counts a token of self-attention, without norm and sum around it."""
    if stack.latent is not None:
        return latent.kept(batch, stack, stack.latent)
    query, key = _widths(batch, stack)
    products = projected(batch, stack)
    mixed = query
    if not _is_tiled(batch, stack) and stack.position != "relative":
        mixed += STATISTIC * stack.heads
    # Values are a view of the product; rotated or normed queries and keys are copies.
    turned = query + key if position.rotates(stack, number) or stack.qk_norm else 0
    summed, copied = values.kept_sum(batch, stack, number)
    # Sigmoid of the gate, and its product with the result of attention.
    further = _kept_norms(batch, stack) + copied + 2 * query * stack.attention_gate
    results = products + mixed
    whole = results + turned + summed + further
    if batch.sequence > 1:
        # Attention keeps what it has received instead, and the next product what came back.
        reads_product = stack.qk_norm or summed
        whole = sum(exchanged(batch, stack)) + mixed + further + (products if reads_product else 0)
    return Kept(whole, results + stack.width * batch.compute)


def _kept_norms(batch: MicroBatch, stack: StackConfig) -> int:
    if not stack.qk_norm:
        return 0
    # LayerNorm is one kernel; weights of each head multiply its result.
    each = {"layer": 0, "heads": batch.exact}.get(str(stack.qk_norm))
    if each is None:
        each = batch.exact if batch.on_cpu else 4 * (stack.norm_offset and batch.compute < 4)
    return (stack.heads + stack.num_kv_heads) * (each * stack.per_head_width + STATISTIC)


def exchanged(batch: MicroBatch, stack: StackConfig) -> tuple[int, int]:
    """Returns bytes a token of queries, keys and values for the exchange of ranks, and of results."""
    if batch.sequence == 1:
        return 0, 0
    query, key = _widths(batch, stack)
    copies = copies_of_heads(stack.heads, stack.num_kv_heads, batch.sequence * batch.tensor)
    return query + 2 * copies * key, query


def cross_kept(batch: MicroBatch, stack: StackConfig) -> Kept:
    """Counts a target token of cross attention; keys and values are a source token's."""
    query, _ = _widths(batch, stack)
    results = 2 * query + (0 if _is_tiled(batch, stack) else STATISTIC * stack.heads)
    _, back = exchanged(batch, stack)
    return Kept(results + back, results + stack.width * batch.compute)


def source_kept(batch: MicroBatch, stack: StackConfig) -> int:
    """Returns bytes a source token of its keys and values, and of autocast's copy of the encoder's output."""
    _, key = _widths(batch, stack)
    copies = copies_of_heads(stack.heads, stack.num_kv_heads, batch.sequence * batch.tensor)
    gathered = (batch.tensor > 1) * batch.tensor * batch.compute
    return 2 * copies * key + stack.width * (batch.copied + gathered)


def score_bytes(batch: MicroBatch, stack: StackConfig) -> int:
    """Returns bytes of scores that `selective` keeps of tiled attention on a CPU, where they are products."""
    is_tiled = _is_tiled(batch, stack)
    if not batch.on_cpu or not (is_tiled or stack.position == "relative"):
        return 0
    ranks = batch.sequence * batch.tensor
    length = batch.length * ranks
    source = batch.source_length * ranks if is_tiled else 0
    pairs = 0
    for start in range(0, length, _TILE):
        queries = min(_TILE, length - start)
        keys = start + queries if batch.causal else length
        pairs += queries * (keys + source)
    return batch.rows * stack.heads // ranks * pairs * batch.compute


def num_values(stack: StackConfig) -> int:
    """Returns the values of a layer's projections, of which autocast makes copies."""
    heads = (2 + stack.attention_gate) * stack.heads + 2 * stack.num_kv_heads
    return stack.width * heads * stack.per_head_width
