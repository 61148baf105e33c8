"""A mixture of experts in place of the feed-forward layer of a block (`model.decoder.experts`)."""

from pretrain.config.model.experts import ExpertsConfig
from pretrain.config.model.parts import feedforward
from pretrain.config.model.parts.counts import FlopCounter, Weights, linear
from pretrain.config.model.stack import StackConfig


def weights(stack: StackConfig, experts: ExpertsConfig, name: str) -> Weights:
    """Yields the router, the matrices of all experts, and shared experts."""
    yield from linear(f"{name}.router", stack.width, experts.count, stack.bias, "feedforward")
    for weight in feedforward.weights(stack, name, stack.expert_width):
        # The matrices of all experts are one parameter of three dimensions, their biases one vector.
        weight = weight._replace(experts=(experts.top_k, experts.count), is_cut=False)
        if len(weight.shape) == 2:
            rows = (weight.fused or weight.shape[:1]) * experts.count
            yield weight._replace(shape=(experts.count, *weight.shape), fused=rows)
        else:
            yield weight._replace(shape=(experts.count * weight.shape[0],))
    if experts.shared:
        hidden = experts.shared * stack.expert_width
        yield from feedforward.weights(stack, f"{name}.shared", hidden)


def flops(count: FlopCounter, stack: StackConfig, experts: ExpertsConfig, name: str, tokens: int, reads: bool) -> bool:
    """Adds the router, a row for each expert that a token chooses, and the shared experts."""
    weighed = count.linear(f"{name}.router", tokens, reads)
    result = feedforward.flops(count, stack, name, tokens * experts.top_k, reads)
    shared = bool(experts.shared) and feedforward.flops(count, stack, f"{name}.shared", tokens, reads)
    return weighed or result or shared
