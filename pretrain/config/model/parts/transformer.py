"""Counts of a Transformer: of its embeddings, stacks, further modules and head, added up."""

from pretrain.config.model import GENERATOR
from pretrain.config.model.parts import attention, block, embedding, further_tokens, head, norm, position, values
from pretrain.config.model.parts.counts import FlopCounter, NamedWeight, RowTokens, Weights, linear
from pretrain.config.model.stack import StackConfig
from pretrain.config.model.transformer import ModelConfig


class TransformerCounts:
    """Counts of a Transformer whose vocabulary, and labels, are known."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model

    def weights(self) -> Weights:
        """Yields every parameter; a shared one has its first name only."""
        model = self.model
        yield from embedding.weights(model)
        if model.encoder is not None:
            yield from _stack_weights(model, "encoder", model.encoder, reads_encoder=False)
        if model.decoder is not None:
            yield from _stack_weights(model, "decoder", model.decoder, reads_encoder=model.reads_encoder)
        yield from further_tokens.weights(model)
        yield from head.weights(model)
        if model.generator_heads:
            yield from self._generator_weights()

    def _generator_weights(self) -> Weights:
        for weight in TransformerCounts(self.model.generator).weights():
            if weight.group == "head":  # its scores are of places, and neither cut nor lengthened
                weight = weight._replace(is_table=False, is_cut=False)
            if not weight.name.startswith(self.model.generator_reads):
                yield weight._replace(name=GENERATOR + weight.name, group="generator")

    def flops(self, count: FlopCounter, target: int, source: int) -> dict[str, int]:
        """Adds a row of so many tokens, of two stacks with a source of so many.

        Returns the number of the first blocks of each stack that no gradient reaches.
        """
        model = self.model
        frozen: dict[str, int] = {}
        stream = False
        if model.encoder is not None:
            tokens = target if model.decoder is None else source
            patches = False
            if model.input is not None:
                cut = tokens - model.input.num_before
                patches = count.linear(f"{embedding.patches_name(model)}.projection", cut, reads=False)
            row = RowTokens(tokens)
            stream, frozen["encoder"] = _stack_flops(count, model, "encoder", model.encoder, row, patches)
        if model.decoder is not None:
            if model.has_bridge:
                stream = count.linear("bridge", source, stream)
            restored = model.restores and (stream or count.has("mask.weight"))
            row = RowTokens(target, source if model.reads_encoder else None, stream)
            stream, frozen["decoder"] = _stack_flops(count, model, "decoder", model.decoder, row, restored)
        head.flops(count, model, target, stream)
        further_tokens.flops(count, model, target, stream)
        return frozen


def _stack_weights(model: ModelConfig, name: str, stack: StackConfig, *, reads_encoder: bool) -> Weights:
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
        yield from block.weights(stack, f"{name}.blocks.{number}", number, reads_encoder=reads_encoder)
    if stack.norm_placement != "post":
        yield from norm.weights(stack, f"{name}.norm")


def _stack_flops(
    count: FlopCounter, model: ModelConfig, name: str, stack: StackConfig, row: RowTokens, reads: bool
) -> tuple[bool, int]:
    """Adds all blocks; returns also how many of the first no gradient reaches.

    `reads`: the input has a gradient besides that of tables.
    """
    frozen = 0
    first_values = False
    bias = position.has_bias_gradient(count, stack, name)
    stream = reads or embedding.has_gradient(count, model, name) or position.has_gradient(count, stack, name)
    stream = count.norm(f"{name}.input_norm", stream)
    if stack.embedding_width:
        stream = count.linear(f"{name}.expand", row.tokens, stream)
    causal = name == "decoder" and not model.restores
    for number in range(stack.layers):
        pairs = attention.pairs(count, stack, number, row.tokens, causal=causal)
        mixed = first_values or values.has_gradient(count, stack, name, number)
        stream, own = block.flops(
            count, stack, f"{name}.blocks.{number}", number, row, pairs, stream=stream, bias=bias, mixed=mixed
        )
        if stack.value_residual and number == 0:
            first_values = own
        frozen += not stream
    return count.norm(f"{name}.norm", stream), frozen
