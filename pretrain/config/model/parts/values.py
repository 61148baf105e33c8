"""Values of other layers and of tokens that a layer mixes with its own (`value_residual`, `value_embeddings`)."""

from pretrain.config.model.parts.counts import FlopCounter, NamedWeight, Weights
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
