"""The head of a model, and the pooler before it (`model.head`, `model.pooler`)."""

from pretrain.config.model.parts import norm
from pretrain.config.model.parts.counts import STATISTIC, FlopCounter, MicroBatch, NamedWeight, Weights, linear
from pretrain.config.model.transformer import ModelConfig


def weights(model: ModelConfig) -> Weights:
    """Yields the layers before the scores, their weight unless it is tied, their bias, and the pooler."""
    stack = model.last_stack
    head = model.head
    group = "head"
    if head.learned_temperature:
        yield NamedWeight("head.log_scale", (1,), group)
    if head.record.has_scores:
        if head.transform:
            yield from linear("head.transform", stack.width, model.head_width, stack.bias, group)
            if head.record.has_norm:
                yield from norm.weights(stack, "head.norm", model.head_width, group)
        of_tokens = head.record.scores_words
        if not model.tied_embeddings:
            yield NamedWeight("head.weight", (model.num_head_rows, model.head_width), group, of_tokens, of_tokens)
        if head.bias:
            yield NamedWeight("head.bias", (model.num_head_rows,), group, of_tokens, of_tokens)
    if model.pooler:
        yield from linear("pooler", stack.width, stack.width, True, "pooler")


def flops(count: FlopCounter, model: ModelConfig, tokens: int, reads: bool) -> None:
    """Adds the head at all positions; no pooler."""
    if not model.head.record.has_scores:
        return
    if model.head.transform:
        reads = count.norm("head.norm", count.linear("head.transform", tokens, reads, "head"))
    weight = count.has("embedding.weight" if model.tied_embeddings else "head.weight")
    count.add("head", model.num_head_rows * model.head_width * tokens, reads + weight)


def kept(batch: MicroBatch, model: ModelConfig, positions: int, *, trains_head: bool) -> tuple[int, int]:
    """Returns bytes of the layers before the scores, and of the gradients that the loss makes forward."""
    if not model.head.record.has_scores:
        return 0, 0
    stack = model.last_stack
    width = model.head_width
    before = 0
    if model.head.transform:
        before = positions * ((stack.width + width) * batch.compute + norm.kept(batch, stack, width))
    if model.restores:  # pixels, predicted ones and their difference, by autograd
        return before, positions * (width * batch.compute + 3 * model.num_head_rows * STATISTIC)
    sums = model.num_head_rows // batch.tensor * (width + model.head.bias) if trains_head else 0
    return before, (1 + model.multi_token) * (positions * width + sums) * batch.compute
