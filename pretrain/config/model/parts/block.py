"""A block of a stack: its sub-layers, and norms and factors around each."""

from typing import NamedTuple

from pretrain.config.model.mixers.counted import counts_of
from pretrain.config.model.parts import attention, experts, feedforward, norm, values
from pretrain.config.model.parts.counts import FlopCounter, Kept, MicroBatch, NamedWeight, RowTokens, Weights
from pretrain.config.model.stack import StackConfig


def weights(stack: StackConfig, name: str, number: int, *, reads_encoder: bool = False) -> Weights:
    """Yields the parameters of a block in the order of use."""
    stack = stack.of_layer(number)
    if stack.residual_scalars and number > 0:
        yield NamedWeight(f"{name}.residual_mix", (2,), "attention")
    if stack.norms_attention(number):
        yield from norm.weights(stack, f"{name}.attention_norm")
    if mixer := stack.mixer(number):
        yield from counts_of(mixer).weights(stack, f"{name}.attention")
    else:
        yield from attention.weights(stack, f"{name}.attention", number)
    is_sandwich = stack.norm_placement == "sandwich"
    if is_sandwich:
        yield from norm.weights(stack, f"{name}.attention_output_norm")
    if stack.layer_scale is not None:
        layers = {"attention": True, "feedforward": stack.has_feedforward(number), "cross": reads_encoder}
        for layer in (layer for layer, is_there in layers.items() if is_there):
            yield NamedWeight(f"{name}.{layer}_scale", (stack.width,), "attention")
    if reads_encoder:
        yield from norm.weights(stack, f"{name}.cross_norm")
        yield from attention.cross_weights(stack, f"{name}.cross")
        if is_sandwich:
            yield from norm.weights(stack, f"{name}.cross_output_norm")
    if stack.has_feedforward(number):
        yield from _feedforward_weights(stack, name, number)


def _feedforward_weights(stack: StackConfig, name: str, number: int) -> Weights:
    if stack.parallel != "one_norm":
        yield from norm.weights(stack, f"{name}.feedforward_norm")
    if stack.experts is not None and stack.has_experts(number):
        yield from experts.weights(stack, stack.experts, f"{name}.feedforward")
    else:
        yield from feedforward.weights(stack, f"{name}.feedforward", stack.ff_width)
    if stack.norm_placement == "sandwich":
        yield from norm.weights(stack, f"{name}.feedforward_output_norm")


class _Stream:
    """Stream of a block: whether it has a gradient, after each sub-layer."""

    def __init__(self, count: FlopCounter, stack: StackConfig, name: str, has_gradient: bool) -> None:
        self._count = count
        self._placement = stack.norm_placement
        self._name = name
        self.has_gradient = has_gradient or count.has(f"{name}.residual_mix")

    def read(self, layer: str) -> bool:
        if self._placement in ("pre", "sandwich"):
            return self._count.norm(f"{self._name}.{layer}_norm", self.has_gradient)
        return self.has_gradient

    def add(self, layer: str, result: bool) -> None:
        result = result or self._count.has(f"{self._name}.{layer}_scale")
        norm = f"{self._name}.{layer}_norm"
        if self._placement == "pre":
            self.has_gradient = self.has_gradient or result
        elif self._placement == "post":
            self.has_gradient = self._count.norm(norm, self.has_gradient or result)
        else:
            if self._placement == "sandwich":
                norm = f"{self._name}.{layer}_output_norm"
            self.has_gradient = self.has_gradient or self._count.norm(norm, result)


def flops(
    count: FlopCounter, stack: StackConfig, name: str, number: int, row: RowTokens, pairs: int, *,
    stream: bool, bias: bool, mixed: bool = False,
) -> tuple[bool, bool]:  # fmt: skip
    """Adds a block; returns also if its own values have a gradient.

    `stream`: its input has a gradient; `bias` and `mixed` as in `attention.flops`.
    """
    stack = stack.of_layer(number)
    passed = _Stream(count, stack, name, stream)
    before = read = passed.read("attention")
    if stack.parallel is True:
        before = passed.read("feedforward")
    layer = f"{name}.attention"
    if mixer := stack.mixer(number):
        result = counts_of(mixer).flops(count, stack, layer, row.tokens, read)
        has_values = False
    else:
        read_by = (read, bias, mixed)
        result, has_values = attention.flops(count, stack, layer, row.tokens, pairs, *read_by)
    passed.add("attention", result)
    if row.source is not None:
        passed.add("cross", attention.cross_flops(count, stack, f"{name}.cross", row, passed.read("cross")))
    if not stack.has_feedforward(number):
        return passed.has_gradient, has_values
    read = before if stack.parallel else passed.read("feedforward")
    layer = f"{name}.feedforward"
    if stack.experts is not None and stack.has_experts(number):
        result = experts.flops(count, stack, stack.experts, layer, row.tokens, read)
    else:
        result = feedforward.flops(count, stack, layer, row.tokens, read)
    passed.add("feedforward", result)
    return passed.has_gradient, has_values


class BlockBytes(NamedTuple):
    """Bytes that a block keeps, by the mode of activation checkpointing."""

    none: int
    selective: int
    full: int


def dropout_bytes(batch: MicroBatch, stack: StackConfig) -> int:
    """Returns bytes that dropout remembers of a value: a flag on CUDA, a factor on a CPU."""
    if not stack.dropout:
        return 0
    return batch.compute if batch.on_cpu else 1


def _kept_around(batch: MicroBatch, stack: StackConfig, *, normed: bool = True, shared: bool | str = False) -> int:
    """Returns bytes a token of a sub-layer's input, norms, dropout and scale; `shared`: the stack's `parallel`."""
    # The gradient of learned factors needs the result that they scale.
    scaled = 0
    if stack.layer_scale is not None:
        is_normed_after = stack.norm_placement in ("output", "sandwich")
        scaled = batch.residual if is_normed_after else batch.compute
    # The columns of all ranks that share matrices; attention has read the same stream or input.
    read = batch.tensor * batch.compute
    if shared is True:
        read -= batch.residual
    if shared == "one_norm" and not batch.copied and batch.tensor == 1:
        read = 0
    norms = (normed + (stack.norm_placement == "sandwich")) * (shared != "one_norm")
    each = read + dropout_bytes(batch, stack) + scaled
    return stack.width * each + norms * norm.kept(batch, stack)


def tile(batch: MicroBatch, stack: StackConfig, number: int) -> Kept:
    """Counts a token of a block's feed-forward layer or experts, without their input."""
    if stack.experts is not None and stack.has_experts(number):
        return experts.kept(batch, stack, stack.experts)
    return feedforward.kept(batch, stack) if stack.has_feedforward(number) else Kept(0)


def _kept_feedforward(batch: MicroBatch, stack: StackConfig, number: int) -> Kept:
    if not stack.has_feedforward(number):
        return Kept(0)
    around = _kept_around(batch, stack, shared=stack.parallel)
    if batch.tiles > 1:
        # The columns of other ranks are gathered again with each tile, and go with it.
        return Kept(around - (batch.tensor - 1) * stack.width * batch.compute)
    inside = tile(batch, stack, number)
    return Kept(around + inside.whole, inside.products)


def kept(batch: MicroBatch, stack: StackConfig, number: int) -> BlockBytes:
    """Counts a micro-batch in a block."""
    stack = stack.of_layer(number)
    around = _kept_around(batch, stack, normed=stack.norms_attention(number))
    if mixer := stack.mixer(number):
        mixed = counts_of(mixer).kept(batch, stack)
        scores = 0
        values_copied = counts_of(mixer).num_values(stack)
    else:
        mixed = attention.kept(batch, stack, number)
        scores = attention.score_bytes(batch, stack)
        values_copied = attention.num_values(stack)
    layers = [Kept(around + mixed.whole, mixed.products), _kept_feedforward(batch, stack, number)]
    if stack.experts is None:
        values_copied += feedforward.num_values(stack, stack.expert_width)
    else:
        values_copied += experts.num_values(stack, stack.experts)
    if batch.source_length:
        crossed = attention.cross_kept(batch, stack)
        layers.append(Kept(_kept_around(batch, stack) + crossed.whole, crossed.products))
        values_copied += attention.num_values(stack)
    if stack.residual_scalars and number > 0:
        layers.append(Kept(stack.width * batch.residual))  # the stream before the scalars
    source = attention.source_kept(batch, stack) * batch.rows * batch.source_length
    whole = sum(layer.whole for layer in layers) * batch.tokens + source
    products = sum(layer.products for layer in layers) * batch.tokens + source
    products += scores
    entry = stack.width * batch.residual * batch.tokens
    shown = values.kept_first(batch, stack, number) * batch.tokens
    return BlockBytes(whole + batch.copied * values_copied, entry + products, entry + shown)
