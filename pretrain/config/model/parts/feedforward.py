"""The feed-forward layer of a block."""

from pretrain.config.model.parts.counts import FlopCounter, Kept, MicroBatch, Weights, linear
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


def kept_inside(batch: MicroBatch, stack: StackConfig, hidden: int) -> Kept:
    """Counts a row between both products, and the result of the first one."""
    size = hidden * batch.compute
    products = (1 + stack.gated) * size
    # The backward pass of ReLU needs its result only, which the next product holds too; a square needs its input.
    is_relu = stack.activation == "relu" and not stack.gated
    whole = 2 * size
    if stack.gated:
        whole = 4 * size
    elif is_relu:
        whole = size
    if batch.compiles:  # an activation or a product is computed again; signs of ReLU are kept
        return Kept(min(whole, 3 * size) + hidden * is_relu, products)
    # Of x sigmoid(1.702 x) also the sigmoid; a bound or a shift of a projection is a copy of it.
    further = int(stack.activation == "quick_gelu")
    if stack.gated:
        is_bounded = stack.gate_limit is not None
        further += (stack.activation == "relu2") + is_bounded + (is_bounded or stack.gate_shift != 0)
    return Kept(whole + further * size, products)


def kept(batch: MicroBatch, stack: StackConfig) -> Kept:
    """Counts a token of a layer, without its input."""
    inside = kept_inside(batch, stack, stack.ff_width)
    return Kept(inside.whole, inside.products + stack.width * batch.compute)


def num_values(stack: StackConfig, hidden: int) -> int:
    """Returns the values of a layer's matrices, of which autocast makes copies."""
    return stack.width * hidden * (3 if stack.gated else 2)
