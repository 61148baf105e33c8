"""Values of other layers and of tokens that a layer mixes with its own (`value_residual`, `value_embeddings`)."""

from pretrain.config.model.parts.counts import FlopCounter, MicroBatch, NamedWeight, Weights
from pretrain.config.model.stack import StackConfig


def weights(stack: StackConfig, name: str, number: int) -> Weights:
    """Yields the factors of a layer that mixes values."""
    parts = stack.value_parts(number)
    if parts > 1:
        yield NamedWeight(f"{name}.value_mix", (parts,), "attention")


def tables(stack: StackConfig, name: str, rows: int) -> Weights:
    """Yields the embeddings of a stack, as wide as the values of a layer."""
    width = stack.num_kv_heads * stack.per_head_width
    for number in range(stack.value_embeddings):
        table = f"{name}.value_embedding.{number}.weight"
        yield NamedWeight(table, (rows, width), "embedding", is_cut=True, is_table=True)


def has_gradient(count: FlopCounter, stack: StackConfig, name: str, number: int) -> bool:
    """Returns True if the embedding that a layer of a stack mixes in is trained."""
    return count.has(f"{name}.value_embedding.{stack.value_table(number)}.weight")


def kept_sum(batch: MicroBatch, stack: StackConfig, number: int) -> tuple[int, int]:
    """Returns bytes a token of the sum of a layer's values and others, and of autocast's copy of an embedding."""
    if stack.value_parts(number) == 1:
        return 0, 0
    values = stack.num_kv_heads * stack.per_head_width * batch.compute
    return values, values * (stack.value_table(number) is not None and batch.copied > 0)


def kept_embeddings(batch: MicroBatch, stack: StackConfig) -> int:
    """Returns bytes a token of the embeddings that layers mix in."""
    return stack.value_embeddings * stack.num_kv_heads * stack.per_head_width * batch.residual


def kept_first(batch: MicroBatch, stack: StackConfig, number: int) -> int:
    """Returns bytes a token of the product that other blocks read a view of: the first block's values."""
    if not stack.value_residual or number > 0:
        return 0
    return (stack.heads + 2 * stack.num_kv_heads) * stack.per_head_width * batch.compute
