"""A block of a stack: its sub-layers, and norms and factors around each."""

from pretrain.config.model.parts import attention, experts, feedforward, norm
from pretrain.config.model.parts.counts import NamedWeight, Weights
from pretrain.config.model.stack import StackConfig


def weights(stack: StackConfig, name: str, number: int, *, reads_encoder: bool = False) -> Weights:
    """Yields the parameters of a block in the order of use."""
    if stack.residual_scalars and number > 0:
        yield NamedWeight(f"{name}.residual_mix", (2,), "attention")
    if stack.norms_attention(number):
        yield from norm.weights(stack, f"{name}.attention_norm")
    yield from attention.weights(stack, f"{name}.attention", number)
    is_sandwich = stack.norm_placement == "sandwich"
    if is_sandwich:
        yield from norm.weights(stack, f"{name}.attention_output_norm")
    if stack.layer_scale is not None:
        for layer in ("attention", "feedforward", *(["cross"] if reads_encoder else [])):
            yield NamedWeight(f"{name}.{layer}_scale", (stack.width,), "attention")
    if reads_encoder:
        yield from norm.weights(stack, f"{name}.cross_norm")
        yield from attention.cross_weights(stack, f"{name}.cross")
        if is_sandwich:
            yield from norm.weights(stack, f"{name}.cross_output_norm")
    if stack.parallel != "one_norm":
        yield from norm.weights(stack, f"{name}.feedforward_norm")
    if stack.experts is not None and stack.has_experts(number):
        yield from experts.weights(stack, stack.experts, f"{name}.feedforward")
    else:
        yield from feedforward.weights(stack, f"{name}.feedforward", stack.ff_width)
    if is_sandwich:
        yield from norm.weights(stack, f"{name}.feedforward_output_norm")
