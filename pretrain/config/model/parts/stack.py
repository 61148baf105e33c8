"""Counts of a stack: its blocks, and tables and norms around them."""

from pretrain.config.model.mixers.counted import counts_of
from pretrain.config.model.parts import (
    attention,
    block,
    embedding,
    experts,
    feedforward,
    further_tokens,
    norm,
    position,
    values,
)
from pretrain.config.model.parts.block import BlockBytes
from pretrain.config.model.parts.counts import FlopCounter, MicroBatch, NamedWeight, RowTokens, Weights, linear
from pretrain.config.model.stack import StackConfig
from pretrain.config.model.transformer import ModelConfig
from pretrain.kinds.mixers import MIXERS


class StackCounts:
    """Counts of the encoder or the decoder of a model.

    Attributes:
        name: `encoder` or `decoder`.
        reads_encoder: Blocks have cross attention.
        causal: A token reads those before it alone.
        numbers: Numbers of its blocks, and then of the blocks that modules of further tokens are like.
        num_further: Number of these modules.
    """

    def __init__(self, model: ModelConfig, name: str) -> None:
        self._model = model
        self._stack: StackConfig = getattr(model, name)
        self.name = name
        self.reads_encoder = name == "decoder" and model.reads_encoder
        self.causal = name == "decoder" and not model.restores
        self.num_further = model.multi_token
        self.numbers = [*range(self.layers), *self.num_further * [further_tokens.predictor_number(self._stack)]]

    @property
    def layers(self) -> int:
        """Number of blocks, without further modules."""
        return self._stack.layers

    @property
    def width(self) -> int:
        """Width D of the stream between blocks."""
        return self._stack.width

    @property
    def norms_first(self) -> bool:
        """True if sub-layers read a norm, and add what they make as it is."""
        return self._stack.norm_placement == "pre"

    def weights(self) -> Weights:
        """Yields the parameters of the stack in the order of use."""
        model, stack, name = self._model, self._stack, self.name
        yield from position.weights(stack, name, model.first_position(name) + model.positions_of(name))
        if stack.token_types:
            shape = (stack.token_types, stack.table_width)
            yield NamedWeight(f"{name}.token_type.weight", shape, "embedding")
        yield from values.tables(stack, name, model.padded_vocab_size if stack.value_embeddings else 0)
        if stack.input_norm:
            yield from norm.weights(stack, f"{name}.input_norm", stack.table_width)
        if stack.embedding_width:
            yield from linear(f"{name}.expand", stack.embedding_width, stack.width, True, "embedding")
        for number in range(stack.layers):
            yield from block.weights(stack, f"{name}.blocks.{number}", number, reads_encoder=self.reads_encoder)
        if stack.norm_placement != "post":
            yield from norm.weights(stack, f"{name}.norm")

    def flops(self, count: FlopCounter, row: RowTokens, reads: bool) -> tuple[bool, int]:
        """Adds all blocks; returns also how many of the first no gradient reaches.

        `reads`: the input has a gradient besides that of tables.
        """
        stack, name = self._stack, self.name
        frozen = 0
        first_values = False
        bias = position.has_bias_gradient(count, stack, name)
        stream = reads or embedding.has_gradient(count, self._model, name)
        stream = stream or position.has_gradient(count, stack, name)
        stream = count.norm(f"{name}.input_norm", stream)
        if stack.embedding_width:
            stream = count.linear(f"{name}.expand", row.tokens, stream)
        for number in range(stack.layers):
            pairs = attention.pairs(count, stack, number, row.tokens, causal=self.causal)
            mixed = first_values or values.has_gradient(count, stack, name, number)
            gradients = {"stream": stream, "bias": bias, "mixed": mixed}
            stream, own = block.flops(count, stack, f"{name}.blocks.{number}", number, row, pairs, **gradients)
            if stack.value_residual and number == 0:
                first_values = own
            frozen += not stream
        return count.norm(f"{name}.norm", stream), frozen

    def block(self, batch: MicroBatch, number: int) -> BlockBytes:
        """Returns bytes that a block keeps."""
        return block.kept(batch, self._stack, number)

    def tile(self, batch: MicroBatch) -> int:
        """Returns bytes of a tile of the largest feed-forward layer, and columns gathered for it."""
        inside = max(block.tile(batch, self._stack, number).whole for number in range(self.layers))
        gathered = (batch.tensor > 1) * batch.tensor * self.width * batch.compute
        return -(-batch.tokens // batch.tiles) * (inside + gathered)

    def widest(self, batch: MicroBatch) -> int:
        """Returns bytes of the widest product's result."""
        stack = self._stack
        often = stack.experts.top_k if stack.experts else 1
        inside = feedforward.kept_inside(batch, stack, stack.expert_width)
        widths = [often * inside.products // batch.tiles, attention.projected(batch, stack)]
        columns = [counts_of(MIXERS[name]).widest(stack) for name in stack.replaced_by]
        widths += [batch.compute * number for number in columns]
        return max(widths) * batch.tokens

    def ends(self, batch: MicroBatch) -> int:
        """Returns bytes of norms, dropout, tables and further modules outside the blocks."""
        stack = self._stack
        each = 0
        if stack.norm_placement != "post":
            each += norm.kept(batch, stack)
        if stack.input_norm:
            each += norm.kept(batch, stack, stack.table_width)
        each += (stack.embedding_width or 0) * batch.compute
        if stack.dropout:
            each += stack.table_width * (batch.residual if batch.on_cpu else block.dropout_bytes(batch, stack))
        each += values.kept_embeddings(batch, stack)
        tables = position.kept_tables(batch, stack, self._model.positions_of(self.name))
        return batch.tokens * each + tables + self.num_further * further_tokens.kept_join(batch, stack)

    def exchanged(self, batch: MicroBatch, number: int) -> int:
        """Returns bytes that ranks which share rows exchange in a pass of a block."""
        if batch.sequence == 1:
            return 0
        if mixer := self._stack.mixer(number):
            return sum(counts_of(mixer).exchanged(batch, self._stack)) * batch.tokens
        sent, back = attention.exchanged(batch, self._stack)
        each = (sent + back) * batch.length
        if batch.source_length:  # queries, results, keys and values
            each += 2 * back * batch.length + (sent - back) * batch.source_length
        return batch.rows * each

    def has_experts(self, number: int) -> bool:
        """Returns whether a block has experts."""
        return self._stack.has_experts(number)

    def routed(self, tokens: int, compute: int) -> tuple[int, int]:
        """Returns bytes of rows to and from the experts of a block, and of their counts."""
        assert self._stack.experts is not None
        return experts.routed_bytes(self._stack, self._stack.experts, tokens, compute)

    def collected(self, tokens: int, source: int, repeated: int, compute: int) -> int:
        """Returns bytes of columns that ranks which share matrices gather, and of sums that they cut.

        Args:
            tokens: Tokens of all ranks.
            source: Tokens of the source that cross attention reads.
            repeated: Blocks that are computed again.
            compute: Bytes of a value.
        """
        stack, ids = self._stack, 8
        # A gather and a sum of attention, feed-forward and cross attention, whose keys are one more.
        layers = 1 + stack.has_feedforward(stack.layers - 1) + bool(source)
        each = 2 * layers * tokens + source
        # A block that is computed again stops at what it kept last: the input of its last product.
        kept_behind = stack.norm_placement != "pre" or stack.dropout or stack.layer_scale or stack.drop_path
        last = 0 if kept_behind else tokens
        blocks = stack.width * compute * (each * (2 * stack.layers + repeated) - last * repeated)
        # Of ids: positions of rotations; and of tokens, the sum of whose vectors has a gradient.
        numbers = ids * tokens * (1 + stack.is_rotary + stack.value_embeddings)
        return blocks + numbers + 2 * tokens * compute * stack.table_width
