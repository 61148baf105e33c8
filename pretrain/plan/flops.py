"""FLOPs of training, by the formula that MFU is reported with (Chowdhery et al. 2022, appendix B).

    y = x W    forward 2 FLOPs a weight and token, gradient of x 2, gradient of W 2

All trained, that is 6 N + 12 L D T a token: N are the weights that a token is multiplied with
(projections and head, tied or not; no look-ups, norms and biases), D is the width of all query
heads, and scores and mixing count all T keys, masked ones too. A layer with a window counts the
keys that the window leaves. Neither recomputation nor a pooler is counted.

A frozen W lacks its gradient: 4 N. An x that no trained parameter has gone into lacks the other:
2 N, as in the blocks below the first trained one. An adapter's A and B are two products more, both
trained (Hu et al. 2022, 4.1). All weights of a recurrent model count as trained.

With two stacks a source token meets the encoder and the decoder's keys and values of it, a target
token the rest of the decoder and the head; cross attention has T x S scores. A masked autoencoder
has none: of an image's T vectors the encoder reads S, the decoder all. Modules of `multi_token` count
as a block, a projection and a head each; a generator of replaced tokens is a model of its own.
"""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from pretrain.config.model import AnyModelConfig, LatentConfig, ModelConfig, RecurrentConfig, StackConfig
from pretrain.config.model.parts.embedding import patches_name
from pretrain.plan.params import parameter_shapes
from pretrain.plan.trained import TrainableSubset


@dataclass(frozen=True, slots=True)
class RowFlops:
    """FLOPs on a row."""

    projections: int  # products with weights, without the head
    attention: int  # scores and mixing
    head: int  # output projection, and the layer before it

    @property
    def total(self) -> int:
        """All of it."""
        return self.projections + self.attention + self.head

    def __add__(self, other: "RowFlops") -> "RowFlops":
        projections, attention = self.projections + other.projections, self.attention + other.attention
        return RowFlops(projections, attention, self.head + other.head)

    def part(self, ranks: int) -> "RowFlops":
        """Returns those of one of the ranks that share the row."""
        return RowFlops(self.projections // ranks, self.attention // ranks, self.head // ranks)


@dataclass(frozen=True, slots=True)
class TrainingFlops:
    """FLOPs of training on a row."""

    whole: RowFlops  # forward and backward pass
    forward: RowFlops  # forward pass
    frozen_blocks: dict[str, int]  # first blocks of each stack that no gradient reaches


class _Walk:
    """Visits a model in the order of computation; methods return if their result has a gradient."""

    def __init__(self, model: ModelConfig, trained: TrainableSubset | None, window: int | None = None) -> None:
        self.shapes = parameter_shapes(model)
        self.names: Collection[str] = self.shapes.keys() if trained is None else trained.names
        self.layers = frozenset() if trained is None else trained.layers
        self.causal = not model.restores
        self.captions = model.captions
        self.window = window
        self.rank = 0 if trained is None else trained.finetune.rank
        self.whole: Counter[str] = Counter()
        self.forward: Counter[str] = Counter()

    def add(self, part: str, products: int, gradients: int) -> None:
        """Adds a product of so many multiplications, and as many gradients of it."""
        self.whole[part] += 2 * products * (1 + gradients)
        self.forward[part] += 2 * products

    def has(self, *names: str) -> bool:
        return any(name in self.names for name in names)

    def norm(self, name: str, reads: bool) -> bool:
        return reads or self.has(f"{name}.weight", f"{name}.bias")

    def linear(self, name: str, tokens: int, reads: bool, part: str = "projections") -> bool:
        """Adds a layer and its adapter."""
        *_, outputs, inputs = self.shapes[f"{name}.weight"]
        weight = self.has(f"{name}.weight")
        adapted = name in self.layers
        self.add(part, inputs * outputs * tokens, reads + weight)
        if adapted:
            self.add(part, self.rank * inputs * tokens, reads + 1)
            self.add(part, self.rank * outputs * tokens, 2)
        return reads or weight or adapted or self.has(f"{name}.bias")

    def mix(self, products: int, query: bool, key: bool, value: bool, bias: bool = False) -> bool:
        """Adds scores and mixing, each of so many products."""
        scores = query or key or bias
        self.add("attention", products, query + key)
        self.add("attention", products, scores + value)
        return scores or value

    def attention(
        self, name: str, stack: StackConfig, tokens: int, pairs: int, reads: bool, bias: bool, others: bool
    ) -> tuple[bool, bool]:
        """Adds self-attention; returns also if its own values have a gradient. `others`: those mixed with them."""
        if stack.latent is not None:
            return self.latent(name, stack, stack.latent, tokens, pairs, reads), False
        made = self.linear(f"{name}.qkv", tokens, reads)
        query = made or self.has(f"{name}.query_norm.weight")
        key = made or self.has(f"{name}.key_norm.weight")
        value = made or others or self.has(f"{name}.value_mix")
        mixed = self.mix(stack.heads * stack.per_head_width * pairs, query, key, value, bias)
        return self.linear(f"{name}.output", tokens, mixed), made

    def latent(
        self, name: str, stack: StackConfig, latent: LatentConfig, tokens: int, pairs: int, reads: bool
    ) -> bool:  # fmt: skip
        """Adds latent attention; values count in their own width."""
        queries = reads
        if latent.query_rank is not None:
            queries = self.norm(f"{name}.query_norm", self.linear(f"{name}.query_down", tokens, reads))
        query = self.linear(f"{name}.query_up", tokens, queries)
        down = self.linear(f"{name}.kv_down", tokens, reads)
        key = self.linear(f"{name}.kv_up", tokens, self.norm(f"{name}.kv_norm", down))
        self.add("attention", stack.heads * stack.per_head_width * pairs, query + (key or down))
        scores = query or key or down
        self.add("attention", stack.heads * latent.value_width * pairs, scores + key)
        return self.linear(f"{name}.output", tokens, scores)

    def cross(self, name: str, stack: StackConfig, tokens: int, source: int, reads: bool, encoded: bool) -> bool:
        query = self.linear(f"{name}.query", tokens, reads)
        key = self.linear(f"{name}.key_value", source, encoded)
        mixed = self.mix(stack.heads * stack.per_head_width * tokens * source, query, key, key)
        return self.linear(f"{name}.output", tokens, mixed)

    def feedforward(self, name: str, stack: StackConfig, tokens: int, reads: bool) -> bool:
        """Adds the layer; of experts, a row for each that a token chooses, and the shared ones."""
        if stack.experts is None or f"{name}.router.weight" not in self.shapes:
            return self.branch(name, stack, tokens, reads)
        weighed = self.linear(f"{name}.router", tokens, reads)
        result = self.branch(name, stack, tokens * stack.experts.top_k, reads)
        shared = bool(stack.experts.shared) and self.branch(f"{name}.shared", stack, tokens, reads)
        return weighed or result or shared

    def branch(self, name: str, stack: StackConfig, rows: int, reads: bool) -> bool:
        """Adds both products of a feed-forward layer."""
        hidden = self.linear(f"{name}.{'gate_up' if stack.gated else 'up'}", rows, reads)
        return self.linear(f"{name}.down", rows, hidden)

    def stack(
        self,
        name: str,
        stack: StackConfig,
        tokens: int,
        source: int | None = None,
        encoded: bool = False,
        given: bool = False,
    ) -> tuple[bool, int]:
        """Adds all blocks; returns also how many of the first no gradient reaches.

        `given`: the input has a gradient besides that of tables.
        """
        frozen = 0
        first_values = False
        bias = stack.position == "relative" and self.has(f"{name}.position.weight")
        tables = ["embedding.weight", "embedding.before.weight", "ngram_embedding.weight"]
        tables.append(f"{name}.token_type.weight")
        if self.captions and name == "encoder":
            tables = ["patches.before.weight"]
        stream = given or self.has(*tables)
        stream = stream or (stack.position == "learned" and self.has(f"{name}.position.weight"))
        stream = self.norm(f"{name}.input_norm", stream)
        if stack.embedding_width:
            stream = self.linear(f"{name}.expand", tokens, stream)

        for number in range(stack.layers):
            block = f"{name}.blocks.{number}"
            pairs = self.pairs(name, stack, number, tokens)
            table = f"{name}.value_embedding.{stack.value_table(number)}.weight"
            rows, gradients = (tokens, pairs), (stream, bias, first_values or self.has(table))
            stream, own = self.block(block, stack, *rows, *gradients, source, encoded)
            if stack.value_residual and number == 0:
                first_values = own
            frozen += not stream
        return self.norm(f"{name}.norm", stream), frozen

    def pairs(self, name: str, stack: StackConfig, number: int, tokens: int) -> int:
        """Returns the pairs of query and key of a row: its edges count as the rest."""
        windows = [window for window in (stack.windows[number], self.window) if window is not None]
        reach = tokens
        if windows:
            reach = min(windows) if self.causal and name == "decoder" else 2 * min(windows) - 1
        return tokens * min(tokens, reach)

    def block(
        self,
        block: str,
        stack: StackConfig,
        tokens: int,
        pairs: int,
        stream: bool,
        bias: bool,
        others: bool = False,
        source: int | None = None,
        encoded: bool = False,
    ) -> tuple[bool, bool]:
        """Adds a block; returns also if its own values have a gradient."""
        placement = stack.norm_placement

        def normed(norm: str, stream: bool) -> bool:
            return self.norm(norm, stream) if placement in ("pre", "sandwich") else stream

        def added(norm: str, stream: bool, result: bool) -> bool:
            if placement in ("output", "sandwich"):
                ending = "_output_norm" if placement == "sandwich" else "_norm"
                return stream or self.norm(norm.replace("_norm", ending), result)
            return stream or result if placement == "pre" else self.norm(norm, stream or result)

        stream = stream or self.has(f"{block}.residual_mix")
        norm = f"{block}.attention_norm"
        before = reads = normed(norm, stream)
        if stack.parallel is True:
            before = normed(f"{block}.feedforward_norm", stream)
        mixed, own = self.attention(f"{block}.attention", stack, tokens, pairs, reads, bias, others)
        stream = added(norm, stream, mixed or self.has(f"{block}.attention_scale"))
        if source is not None:
            norm = f"{block}.cross_norm"
            mixed = self.cross(f"{block}.cross", stack, tokens, source, normed(norm, stream), encoded)
            stream = added(norm, stream, mixed or self.has(f"{block}.cross_scale"))
        norm = f"{block}.feedforward_norm"
        read = before if stack.parallel else normed(norm, stream)
        result = self.feedforward(f"{block}.feedforward", stack, tokens, read)
        return added(norm, stream, result or self.has(f"{block}.feedforward_scale")), own

    def multi_token(self, model: ModelConfig, tokens: int, state: bool) -> None:
        """Adds the modules that predict further tokens, and the head after each."""
        stack = model.last_stack
        bias = stack.position == "relative" and self.has("decoder.position.weight")
        embedded = self.has("embedding.weight", "ngram_embedding.weight")
        pairs = self.pairs("decoder", stack, -1, tokens)
        for number in range(model.multi_token):
            name = f"multi_token.inputs.{number}"
            reads = self.norm(f"{name}.embedding_norm", embedded)
            reads = self.norm(f"{name}.hidden_norm", state) or reads
            state = self.linear(f"{name}.projection", tokens, reads)
            state, _ = self.block(f"multi_token.blocks.{number}", stack, tokens, pairs, state, bias)
            self.head(model, tokens, self.norm(f"multi_token.norms.{number}", state))

    def head(self, model: ModelConfig, tokens: int, reads: bool) -> None:
        """Adds the head at all positions."""
        if model.head.kind == "none":
            return
        if model.head.transform:
            reads = self.norm("head.norm", self.linear("head.transform", tokens, reads, "head"))
        weight = self.has("embedding.weight" if model.tied_embeddings else "head.weight")
        self.add("head", model.num_head_rows * model.head_width * tokens, reads + weight)

    def flops(self, head_share: float, frozen_blocks: dict[str, int]) -> TrainingFlops:
        def row(counts: Counter[str]) -> RowFlops:
            head = round(counts["head"] * head_share)
            return RowFlops(counts["projections"], counts["attention"], head)

        return TrainingFlops(row(self.whole), row(self.forward), frozen_blocks)


def _recurrent_flops(model: RecurrentConfig, seq_len: int, source_len: int, head_share: float) -> TrainingFlops:
    """Counts each weight once a token of its side, and two products of width D a pair of tokens."""
    shapes = parameter_shapes(model)

    def weights(*names: str) -> int:
        return sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(names))

    of_target = weights("decoder.rnn.weight", "decoder.score.query", "decoder.readout")
    of_source = weights("encoder.rnn.weight", "decoder.score.key")
    pairs = 0 if model.attention == "none" else seq_len * source_len
    walk = _Walk(model.head_model, None)
    walk.add("projections", of_target * seq_len + of_source * source_len, 2)
    walk.add("attention", 2 * model.decoder.width * pairs, 2)
    walk.head(model.head_model, seq_len, True)
    return walk.flops(head_share, {})


def count_flops(
    model: AnyModelConfig,
    seq_len: int,
    *,
    source_len: int | None = None,
    head_share: float = 1.0,
    trained: TrainableSubset | None = None,
    window: int | None = None,
) -> TrainingFlops:
    """Counts the FLOPs of training on a row of T = `seq_len` tokens; with two stacks, of the target.

    A source has S = `source_len` tokens, by default as many; the head is computed at a share of the
    positions. `trained=None`: the whole model. `window`: that of a step, beside those of layers.
    """
    source = source_len or seq_len
    if isinstance(model, RecurrentConfig):
        return _recurrent_flops(model, seq_len, source, head_share)
    walk = _Walk(model, trained, window)
    frozen: dict[str, int] = {}
    stream = False
    if model.encoder is not None:
        tokens = seq_len if model.decoder is None else source
        patches = False
        if model.input is not None:
            cut = tokens - model.input.num_before
            patches = walk.linear(f"{patches_name(model)}.projection", cut, reads=False)
        stream, frozen["encoder"] = walk.stack("encoder", model.encoder, tokens, given=patches)
    if model.decoder is not None:
        read = source if model.reads_encoder else None
        if model.has_bridge:
            stream = walk.linear("bridge", source, stream)
        given = model.restores and (stream or walk.has("mask.weight"))
        rows = (seq_len, read, stream, given)
        stream, frozen["decoder"] = walk.stack("decoder", model.decoder, *rows)
    walk.head(model, seq_len, stream)
    walk.multi_token(model, seq_len, stream)
    return walk.flops(head_share, frozen)
