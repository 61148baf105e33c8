"""Modules that predict further tokens (`model.multi_token`)."""

from pretrain.config.model.parts import attention, block, head, norm, position
from pretrain.config.model.parts.counts import FlopCounter, MicroBatch, RowTokens, Weights, linear
from pretrain.config.model.stack import StackConfig
from pretrain.config.model.transformer import ModelConfig


def predictor_number(stack: StackConfig) -> int:
    """Returns the number of the block of a stack that the blocks of `multi_token` copy."""
    return max(stack.layers - 1, 1)


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


def flops(count: FlopCounter, model: ModelConfig, tokens: int, state: bool) -> None:
    """Adds the modules, and the head after each; `state`: the hidden states before them have a gradient."""
    stack = model.last_stack
    bias = position.has_bias_gradient(count, stack, "decoder")
    embedded = count.has("embedding.weight", "ngram_embedding.weight")
    like = predictor_number(stack)
    for number in range(model.multi_token):
        name = f"multi_token.inputs.{number}"
        reads = count.norm(f"{name}.embedding_norm", embedded)
        reads = count.norm(f"{name}.hidden_norm", state) or reads
        state = count.linear(f"{name}.projection", tokens, reads)
        name = f"multi_token.blocks.{number}"
        pairs = attention.pairs(count, stack, -1, tokens, causal=True)
        state, _ = block.flops(count, stack, name, like, RowTokens(tokens), pairs, stream=state, bias=bias)
        head.flops(count, model, tokens, count.norm(f"multi_token.norms.{number}", state))


def kept_join(batch: MicroBatch, stack: StackConfig) -> int:
    """Returns bytes of a module outside of its block: norms, a pair of vectors."""
    norms = (3 - (stack.norm_placement == "post")) * norm.kept(batch, stack)
    return batch.tokens * (norms + 2 * stack.width * batch.compute)
