"""Positions of a stack (`model.decoder.position` and the keys beside it)."""

from pretrain.config.model.parts.counts import NamedWeight, Weights
from pretrain.config.model.stack import StackConfig


def weights(stack: StackConfig, name: str, rows: int) -> Weights:
    """Yields the table of learned positions, of so many rows, or of biases by distance."""
    if stack.position == "learned":
        yield NamedWeight(f"{name}.position.weight", (rows, stack.table_width), "position")
    elif stack.position == "relative":
        rows = stack.relative_tables * stack.relative_buckets
        yield NamedWeight(f"{name}.position.weight", (rows, stack.heads), "position")
