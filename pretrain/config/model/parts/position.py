"""Positions of a stack (`model.decoder.position` and the keys beside it)."""

from pretrain.config.model.parts.counts import STATISTIC, FlopCounter, MicroBatch, NamedWeight, Weights
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


def rotates(stack: StackConfig, number: int) -> bool:
    """Returns True if a layer turns its queries and keys."""
    return stack.is_rotary and number not in stack.unrotated_layers


def kept_tables(batch: MicroBatch, stack: StackConfig, max_seq_len: int) -> int:
    """Returns bytes of the fp32 tables of a stack."""
    if stack.position == "sinusoidal":
        return 4 * max_seq_len * stack.width
    if not stack.is_rotary:
        return 0
    rows = min(max_seq_len, 1 << (batch.length - 1).bit_length())
    tables = 2 if stack.rope_local_theta is not None and stack.window is not None else 1
    return 2 * STATISTIC * rows * stack.rotary_width * tables
