"""A mixture of experts in place of the feed-forward layer of a block (`model.decoder.experts`)."""

from pretrain.config.model.experts import ExpertsConfig
from pretrain.config.model.parts import feedforward
from pretrain.config.model.parts.counts import STATISTIC, FlopCounter, Kept, MicroBatch, Weights, linear
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
        yield from feedforward.weights(stack, f"{name}.shared", stack.shared_width)
    if experts.shared_gate:
        yield from linear(f"{name}.shared_gate", stack.width, 1, False, "feedforward")


def flops(count: FlopCounter, stack: StackConfig, experts: ExpertsConfig, name: str, tokens: int, reads: bool) -> bool:
    """Adds the router, a row for each expert that a token chooses, and the shared experts."""
    weighed = count.linear(f"{name}.router", tokens, reads)
    result = feedforward.flops(count, stack, name, tokens * experts.top_k, reads)
    shared = bool(experts.shared) and feedforward.flops(count, stack, f"{name}.shared", tokens, reads)
    if experts.shared_gate:
        shared = count.linear(f"{name}.shared_gate", tokens, reads) or shared
    return weighed or result or shared


def kept(batch: MicroBatch, stack: StackConfig, experts: ExpertsConfig) -> Kept:
    """Counts a row of each expert that a token chooses, before and after it; and shared experts."""
    row = stack.width * batch.compute
    inside = feedforward.kept_inside(batch, stack, stack.expert_width)
    # The router in fp32: logits and scores, twice where the scores of a sigmoid are divided by their
    # sum; weights and sums before a division; three indices of a row.
    scores = experts.count * STATISTIC * (2 if experts.scores == "softmax" else 4)
    routed = experts.top_k * (3 * 8 + 3 * STATISTIC) + scores
    routed += 0 if batch.compute == 4 else 4 * stack.width  # its input in fp32
    routed += experts.top_k * 2 * 8 * (stack.bias + batch.shares_experts)
    whole = routed + experts.top_k * (2 * row + inside.whole)
    products = experts.count * STATISTIC + experts.top_k * (row + inside.products)
    if experts.shared:
        inside = feedforward.kept_inside(batch, stack, stack.shared_width)
        whole += inside.whole
        products += inside.products + row
        # The result that a gate multiplies, and the gate.
        whole += (row + batch.compute) * experts.shared_gate
        products += batch.compute * experts.shared_gate
    return Kept(whole, products)


def num_values(stack: StackConfig, experts: ExpertsConfig) -> int:
    """Returns the values of the matrices of all experts, of which autocast makes copies."""
    routed = experts.count * feedforward.num_values(stack, stack.expert_width)
    return routed + feedforward.num_values(stack, stack.shared_width)


def routed_bytes(stack: StackConfig, experts: ExpertsConfig, tokens: int, compute: int) -> tuple[int, int]:
    """Returns bytes of the rows that go to the experts of a layer and back, and of their counts."""
    return 2 * experts.top_k * tokens * stack.width * compute, 4 * experts.count
