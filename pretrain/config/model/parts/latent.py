"""Latent attention (`model.decoder.latent`)."""

from pretrain.config.model.latent_attention import LatentConfig
from pretrain.config.model.parts.counts import STATISTIC, FlopCounter, Kept, MicroBatch, NamedWeight, Weights, linear
from pretrain.config.model.stack import StackConfig


def weights(stack: StackConfig, latent: LatentConfig, name: str) -> Weights:
    """Yields the projections down, their norms, and the projections up."""
    group = "attention"
    inputs = latent.query_rank or stack.width
    if latent.query_rank is not None:
        yield from linear(f"{name}.query_down", stack.width, inputs, False, group)
        yield NamedWeight(f"{name}.query_norm.weight", (inputs,), "norm")
    yield from linear(f"{name}.query_up", inputs, stack.heads * stack.per_head_width, False, group)
    down_width = latent.kv_rank + latent.rope_width
    yield from linear(f"{name}.kv_down", stack.width, down_width, False, group)
    yield NamedWeight(f"{name}.kv_norm.weight", (latent.kv_rank,), "norm")
    head_width = stack.per_head_width - latent.rope_width + latent.value_width
    yield from linear(f"{name}.kv_up", latent.kv_rank, stack.heads * head_width, False, group)
    yield from linear(f"{name}.output", stack.heads * latent.value_width, stack.width, False, group)


def flops(
    count: FlopCounter, stack: StackConfig, latent: LatentConfig, name: str, tokens: int, pairs: int, reads: bool
) -> bool:  # fmt: skip
    """Adds a layer; values count in their own width."""
    queries = reads
    if latent.query_rank is not None:
        queries = count.norm(f"{name}.query_norm", count.linear(f"{name}.query_down", tokens, reads))
    query = count.linear(f"{name}.query_up", tokens, queries)
    down = count.linear(f"{name}.kv_down", tokens, reads)
    key = count.linear(f"{name}.kv_up", tokens, count.norm(f"{name}.kv_norm", down))
    scores = query or key or down
    count.add("attention", stack.heads * stack.per_head_width * pairs, query + (key or down))
    count.add("attention", stack.heads * latent.value_width * pairs, scores + key)
    return count.linear(f"{name}.output", tokens, scores)


def kept(batch: MicroBatch, stack: StackConfig, latent: LatentConfig) -> Kept:
    """Counts a token: vectors that are projected down twice, before and after their norm."""
    wide = stack.heads * stack.per_head_width * batch.compute
    ranks = latent.kv_rank + (latent.query_rank or 0)
    norms = ranks * batch.exact * batch.on_cpu + 2 * STATISTIC
    down = (ranks + latent.rope_width) * batch.compute
    values = stack.heads * latent.value_width * batch.compute  # as the output projection reads them
    mixed = wide + STATISTIC * stack.heads
    up = stack.heads * (2 * stack.per_head_width - latent.rope_width + latent.value_width) * batch.compute
    whole = down + ranks * batch.compute + norms + 3 * wide + mixed + values
    return Kept(whole, down + up + mixed + stack.width * batch.compute)
