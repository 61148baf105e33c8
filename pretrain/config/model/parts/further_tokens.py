"""Modules that predict further tokens (`model.multi_token`)."""

from pretrain.config.model.parts import block, norm
from pretrain.config.model.parts.counts import Weights, linear
from pretrain.config.model.stack import predictor_number
from pretrain.config.model.transformer import ModelConfig


def weights(model: ModelConfig) -> Weights:
    """Yields the parameters of the modules in the order of use."""
    stack = model.last_stack
    for number in range(model.multi_token):
        name = f"multi_token.inputs.{number}"
        yield from norm.weights(stack, f"{name}.embedding_norm")
        yield from norm.weights(stack, f"{name}.hidden_norm")
        yield from linear(f"{name}.projection", 2 * stack.width, stack.width, False, "embedding")
        yield from block.weights(stack, f"multi_token.blocks.{number}", predictor_number(stack))
        if stack.norm_placement != "post":
            yield from norm.weights(stack, f"multi_token.norms.{number}")
