"""The feed-forward layer of a block."""

from pretrain.config.model.parts.counts import FlopCounter, Weights, linear
from pretrain.config.model.stack import StackConfig


def weights(stack: StackConfig, name: str, hidden: int) -> Weights:
    """Yields both projections of a layer of hidden width F, `hidden`."""
    group = "feedforward"
    if stack.gated:
        rows = (hidden, hidden)
        up = f"{name}.gate_up"
        yield from linear(up, stack.width, 2 * hidden, stack.bias, group, cut="rows", fused=rows)
    else:
        yield from linear(f"{name}.up", stack.width, hidden, stack.bias, group, cut="rows")
    yield from linear(f"{name}.down", hidden, stack.width, stack.bias, group, cut="columns")


def flops(count: FlopCounter, stack: StackConfig, name: str, rows: int, reads: bool) -> bool:
    """Adds both products of a layer, for so many rows."""
    up = "gate_up" if stack.gated else "up"
    return count.linear(f"{name}.down", rows, count.linear(f"{name}.{up}", rows, reads))
