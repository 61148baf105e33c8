"""FLOPs of training, by the formula that MFU is reported with (Chowdhery et al. 2022, appendix B).

    6 N_matmul  +  12 L D T        a token: 2 FLOPs a weight forward, 4 backward; scores and mixing over all T keys

N_matmul are the weights that a token is multiplied with: the projections and the head, but not look-ups, norms and
biases. D is the width of all query heads together, N H. Recomputation is not useful work, and is not counted; nor is a
pooler, which only one token a document needs. Of a model that is trained in part less is needed: `tuned_flops.py`.

With two stacks a source token meets the encoder and the keys and values that the decoder makes of it, a target token
the rest of the decoder and the head; cross attention has T x S scores.

A layer with a window counts the keys that the window leaves, not all T: a kernel for windows computes no others, and
counting them would report more FLOPs than any machine has run.

A recurrent model has the same count for its cells, whose weights meet every token once, and for its attention.
"""

from dataclasses import dataclass

from pretrain.config.model import ModelConfig, StackConfig
from pretrain.config.recurrent import AnyModelConfig, RecurrentConfig
from pretrain.plan.params import attention_weights, cell_matrices, decoder_input_width
from pretrain.plan.trained import TrainableSubset


def _attention_weights(stack: StackConfig) -> tuple[int, int]:
    """Weights of one attention layer: those that meet the queries' tokens, and those that meet the keys' tokens."""
    heads_width, kv_width = stack.heads * stack.per_head_width, stack.num_kv_heads * stack.per_head_width
    return 2 * stack.width * heads_width, 2 * stack.width * kv_width


def _stack_weights(stack: StackConfig) -> int:
    feedforward = stack.width * stack.ff_width * (3 if stack.gated else 2)
    return stack.layers * (sum(_attention_weights(stack)) + feedforward)


def stack_weights(stack: StackConfig, *, reads_encoder: bool = False) -> int:
    """Returns the weights of a stack's projections, those of cross attention too where it reads an encoder."""
    return _stack_weights(stack) + (stack.layers * sum(_attention_weights(stack)) if reads_encoder else 0)


def _head_weights(model: ModelConfig) -> int:
    if model.head.kind == "none":
        return 0
    width = model.last_stack.width
    return model.num_head_rows * width + (width * width if model.head.transform else 0)


def count_matmul_weights(model: ModelConfig) -> int:
    """Returns N_matmul, the head included whether tied or not; `vocab_size` must be known."""
    count = sum(_stack_weights(stack) for stack in (model.encoder, model.decoder) if stack is not None)
    if model.encoder is not None and model.decoder is not None:
        count += model.decoder.layers * sum(_attention_weights(model.decoder))
    return count + _head_weights(model)


def twice_score_pairs(length: int, window: int | None, *, causal: bool, halve_causal: bool) -> int:
    """Twice the pairs of query and key that count in a row of one layer. The edges of a row are not special."""
    if not causal:
        return 2 * length * (length if window is None else min(length, 2 * window - 1))
    reach = length if window is None else min(length, window)
    # The triangle at a row's start is half empty: without a window it is the whole square.
    return reach * (2 * length - reach) if halve_causal else 2 * length * reach


def _self_attention_flops(stack: StackConfig, length: int, *, causal: bool, halve_causal: bool) -> int:
    twice = sum(twice_score_pairs(length, w, causal=causal, halve_causal=halve_causal) for w in stack.windows)
    return 6 * stack.heads * stack.per_head_width * twice


@dataclass(frozen=True, slots=True)
class RowFlops:
    """FLOPs of forward and backward on a row; a third of each is forward, but for what rounding leaves.

    Attributes:
        projections: Matrices of weights, the head's apart.
        attention: Scores and mixing.
        head: The head.
    """

    projections: int
    attention: int
    head: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.projections + self.attention + self.head


def _recurrent_flops(model: RecurrentConfig, seq_len: int, source_len: int | None, head: int) -> RowFlops:
    """A weight of a cell meets every token of its side once; of attention, the source's or the target's."""
    of_target, of_source, of_pair = attention_weights(model)
    of_target += sum(inputs * outputs for inputs, outputs in cell_matrices(model.decoder, decoder_input_width(model)))
    if model.encoder is None:
        return RowFlops(6 * of_target * seq_len, 0, head)
    length = source_len or seq_len
    of_source += sum(inputs * outputs for inputs, outputs in cell_matrices(model.encoder, model.encoder.width))
    pairs = 0 if model.attention == "none" else (max(of_pair, model.decoder.width) + model.decoder.width)
    return RowFlops(6 * (of_target * seq_len + of_source * length), 6 * pairs * seq_len * length, head)


def row_flops(
    model: AnyModelConfig,
    seq_len: int,
    *,
    source_len: int | None = None,
    halve_causal: bool = False,
    head_share: float = 1.0,
) -> RowFlops:
    """Counts the FLOPs of forward and backward on one row, by kind.

    Args:
        model: As the others for `train_flops_per_token`.
        seq_len: Likewise.
        source_len: Likewise.
        halve_causal: Likewise.
        head_share: Of the row's positions, those at which the head is computed: a masked language model's are few.
    """
    if isinstance(model, RecurrentConfig):
        head = round(6 * _head_weights(model.head_model) * seq_len * head_share)
        return _recurrent_flops(model, seq_len, source_len, head)
    head = round(6 * _head_weights(model) * seq_len * head_share)
    projections = attention = 0
    if model.decoder is not None:
        projections += 6 * _stack_weights(model.decoder) * seq_len
        attention += _self_attention_flops(model.decoder, seq_len, causal=True, halve_causal=halve_causal)
    if model.encoder is None:
        return RowFlops(projections, attention, head)
    encoder_len = seq_len
    if model.decoder is not None:
        decoder, encoder_len = model.decoder, source_len or seq_len
        of_target, of_source = _attention_weights(decoder)
        projections += 6 * decoder.layers * (of_target * seq_len + of_source * encoder_len)
        attention += 12 * decoder.layers * decoder.heads * decoder.per_head_width * seq_len * encoder_len
    projections += 6 * _stack_weights(model.encoder) * encoder_len
    attention += _self_attention_flops(model.encoder, encoder_len, causal=False, halve_causal=False)
    return RowFlops(projections, attention, head)


def train_flops_per_row(
    model: AnyModelConfig,
    seq_len: int,
    *,
    source_len: int | None = None,
    halve_causal: bool = False,
    head_share: float = 1.0,
) -> int:
    """Returns the FLOPs of forward and backward on one row; arguments as for `row_flops`."""
    counted = row_flops(model, seq_len, source_len=source_len, halve_causal=halve_causal, head_share=head_share)
    return counted.total


def train_flops_per_token(
    model: AnyModelConfig, seq_len: int, *, source_len: int | None = None, halve_causal: bool = False
) -> int:
    """Returns the FLOPs of forward and backward, per token of a row.

    With two stacks that is a target token with its share of the source, S / T tokens: what a row of S source and T
    target tokens costs, divided by T and rounded down. Multiply by target tokens, not by source and target together.

    Args:
        model: `vocab_size` must be known.
        seq_len: Tokens of a row, T; with two stacks those of the target.
        source_len: Tokens of the source of a row, S; only with two stacks. None: as many as T.
        halve_causal: Count for a decoder only the half of the scores that a causal mask leaves. The full count is the
            field's convention; print this one beside it.
    """
    return train_flops_per_row(model, seq_len, source_len=source_len, halve_causal=halve_causal) // seq_len


# FLOPs of training part of a model: a product's backward pass is as much of two products as
# somebody asks for.
#
#     y = x W    forward 2 FLOPs a weight and token, d loss / d x  2, d loss / d W  2    (Chowdhery et al. 2022, app. B)
#
# All trained that is 6 N a token (`flops.py`). A frozen W lacks the last: 4 N. And an x that no
# trained parameter has gone into lacks the other: 2 N, as in blocks below the first that is
# trained. Scores and mixing have two gradients each, of what their operands are made of. An
# adapter's A and B are two products more, both trained (Hu et al. 2022, 4.1).
#
#     embedding -> blocks, in order, with what the stream so far asks for -> head
#
# That is what autograd does, product by product: tested against torch's own counter.


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

    def __init__(self, trained: TrainableSubset) -> None:
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
    model: ModelConfig,
    trained: TrainableSubset,
    seq_len: int,
    *,
    source_len: int | None = None,
    head_share: float = 1.0,
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
