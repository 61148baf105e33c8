"""FLOPs of training part of a model: a product's backward pass is as much of two products as somebody asks for.

    y = x W    forward 2 FLOPs a weight and token, d loss / d x  2, d loss / d W  2    (Chowdhery et al. 2022, app. B)

All trained that is 6 N a token (`flops.py`). A frozen W lacks the last: 4 N. And an x that no trained parameter has
gone into lacks the other: 2 N, as in blocks below the first that is trained. Scores and mixing have two gradients each,
of what their operands are made of. An adapter's A and B are two products more, both trained (Hu et al. 2022, 4.1).

    embedding -> blocks, in order, with what the stream so far asks for -> head

That is what autograd does, product by product: tested against torch's own counter.
"""

from dataclasses import dataclass

from pretrain.config.model import ModelConfig, StackConfig
from pretrain.plan.flops import RowFlops, twice_score_pairs
from pretrain.plan.trained import Trained


@dataclass(frozen=True, slots=True)
class TunedFlops:
    """Of a row.

    Attributes:
        whole: Forward and backward.
        forward: Forward alone.
        still: Of each stack, the first blocks that no gradient reaches: they keep nothing for the backward pass.
    """

    whole: RowFlops
    forward: RowFlops
    still: dict[str, int]


@dataclass(slots=True)
class _Sum:
    """FLOPs of one kind: forward and backward, and forward alone."""

    whole: float = 0.0
    forward: float = 0.0

    def add(self, products: float, gradients: int) -> None:
        """Adds multiplications and additions of a product, and of as many gradients of it."""
        self.whole += 2 * products * (1 + gradients)
        self.forward += 2 * products


class _Walk:
    """Goes through a model in the order in which it computes; methods return whether their result has a gradient."""

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.projections, self.attention, self.head = _Sum(), _Sum(), _Sum()

    def has(self, *names: str) -> bool:
        """Whether one of these is trained."""
        return any(name in self.trained.names for name in names)

    def norm(self, name: str, reads: bool) -> bool:
        return reads or self.has(f"{name}.weight", f"{name}.bias")

    def linear(self, name: str, inputs: int, outputs: int, tokens: int, reads: bool) -> bool:
        """A layer, and its adapter."""
        weight = self.has(f"{name}.weight")
        self.projections.add(inputs * outputs * tokens, reads + weight)
        adapted = name in self.trained.layers
        if adapted:
            rank = self.trained.finetune.rank
            self.projections.add(rank * inputs * tokens, reads + 1)
            self.projections.add(rank * outputs * tokens, 2)
        return reads or weight or adapted or self.has(f"{name}.bias")

    def mix(self, products: int, query: bool, key: bool, value: bool, bias: bool = False) -> bool:
        """Scores and mixing, of as many pairs of elements."""
        scores = query or key or bias
        self.attention.add(products, query + key)
        self.attention.add(products, scores + value)
        return scores or value

    def self_attention(self, name: str, stack: StackConfig, tokens: int, pairs: int, reads: bool, bias: bool) -> bool:
        heads, kv = stack.heads * stack.per_head_width, stack.num_kv_heads * stack.per_head_width
        made = self.linear(f"{name}.qkv", stack.width, heads + 2 * kv, tokens, reads)
        query = made or self.has(f"{name}.query_norm.weight")
        key = made or self.has(f"{name}.key_norm.weight")
        mixed = self.mix(heads * pairs, query, key, made, bias)
        return self.linear(f"{name}.output", heads, stack.width, tokens, mixed)

    def cross_attention(
        self, name: str, stack: StackConfig, tokens: int, source: int, reads: bool, memory: bool
    ) -> bool:
        heads, kv = stack.heads * stack.per_head_width, stack.num_kv_heads * stack.per_head_width
        query = self.linear(f"{name}.query", stack.width, heads, tokens, reads)
        key = self.linear(f"{name}.key_value", stack.width, 2 * kv, source, memory)
        mixed = self.mix(heads * tokens * source, query, key, key)
        return self.linear(f"{name}.output", heads, stack.width, tokens, mixed)

    def feedforward(self, name: str, stack: StackConfig, tokens: int, reads: bool) -> bool:
        up, width = ("gate_up", 2 * stack.ff_width) if stack.gated else ("up", stack.ff_width)
        hidden = self.linear(f"{name}.{up}", stack.width, width, tokens, reads)
        return self.linear(f"{name}.down", stack.ff_width, stack.width, tokens, hidden)

    def stack(
        self, name: str, stack: StackConfig, stream: bool, tokens: int, source: int | None = None, memory: bool = False
    ) -> tuple[bool, int]:
        """All blocks; returns also how many of the first no gradient reaches."""
        causal, pre, still = name == "decoder", stack.norm_placement == "pre", 0
        bias = stack.position == "relative" and self.has(f"{name}.position.weight")
        stream = stream or self.has(f"{name}.token_type.weight")
        stream = stream or (stack.position == "learned" and self.has(f"{name}.position.weight"))
        stream = self.norm(f"{name}.input_norm", stream)

        def normed(norm: str, stream: bool) -> bool:
            return self.norm(norm, stream) if pre else stream

        def added(norm: str, stream: bool, result: bool) -> bool:
            return stream or result if pre else self.norm(norm, stream or result)

        for number, window in enumerate(stack.windows):
            block = f"{name}.blocks.{number}"
            pairs = twice_score_pairs(tokens, window, causal=causal, halve_causal=False) // 2
            norm = f"{block}.attention_norm"
            mixed = self.self_attention(f"{block}.attention", stack, tokens, pairs, normed(norm, stream), bias)
            stream = added(norm, stream, mixed)
            if source is not None:
                norm = f"{block}.cross_norm"
                mixed = self.cross_attention(f"{block}.cross", stack, tokens, source, normed(norm, stream), memory)
                stream = added(norm, stream, mixed)
            norm = f"{block}.feedforward_norm"
            stream = added(norm, stream, self.feedforward(f"{block}.feedforward", stack, tokens, normed(norm, stream)))
            still += not stream
        return self.norm(f"{name}.norm", stream), still

    def scores(self, model: ModelConfig, tokens: float, reads: bool) -> None:
        """The head, at as many positions."""
        if model.head.kind == "none":
            return
        width = model.last_stack.width
        if model.head.transform:
            weight = self.has("head.transform.weight")
            self.head.add(width * width * tokens, reads + weight)
            reads = self.norm("head.norm", reads or weight or self.has("head.transform.bias"))
        weight = self.has("embedding.weight" if model.tied_embeddings else "head.weight")
        self.head.add(model.num_head_rows * width * tokens, reads + weight)


def tuned_flops(
    model: ModelConfig, trained: Trained, seq_len: int, *, source_len: int | None = None, head_share: float = 1.0
) -> TunedFlops:
    """Counts the FLOPs of a row, of which some parameters are trained; arguments else as for `row_flops`."""
    walk, still = _Walk(trained), {}
    embedded = walk.has("embedding.weight")
    source = None
    encoded = False
    if model.encoder is not None:
        length = seq_len if model.decoder is None else source_len or seq_len
        encoded, still["encoder"] = walk.stack("encoder", model.encoder, embedded, length)
        source = length
    stream = encoded
    if model.decoder is not None:
        stream, still["decoder"] = walk.stack("decoder", model.decoder, embedded, seq_len, source, encoded)
    walk.scores(model, seq_len * head_share, stream)
    sums = walk.projections, walk.attention, walk.head
    whole, forward = ([round(getattr(one, kind)) for one in sums] for kind in ("whole", "forward"))
    return TunedFlops(RowFlops(*whole), RowFlops(*forward), still)
