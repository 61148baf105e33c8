"""Positions of a stack (`model.decoder.position` and the keys beside it)."""

from pretrain.config.model.parts.counts import FlopCounter, NamedWeight, Weights
from pretrain.config.model.stack import StackConfig


def weights(stack: StackConfig, name: str, rows: int) -> Weights:
    """Yields the table of learned positions, of so many rows, or of biases by distance."""
    if stack.position == "learned":
        yield NamedWeight(f"{name}.position.weight", (rows, stack.table_width), "position")
    elif stack.position == "relative":
        rows = stack.relative_tables * stack.relative_buckets
        yield NamedWeight(f"{name}.position.weight", (rows, stack.heads), "position")


def has_bias_gradient(count: FlopCounter, stack: StackConfig, name: str) -> bool:
    """Returns True if the scores of all layers have a bias that is trained."""
    return stack.position == "relative" and count.has(f"{name}.position.weight")


def has_gradient(count: FlopCounter, stack: StackConfig, name: str) -> bool:
    """Returns True if vectors that are added to the input are trained."""
    return stack.position == "learned" and count.has(f"{name}.position.weight")
