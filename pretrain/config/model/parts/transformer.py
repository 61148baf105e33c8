"""Counts of a Transformer: of its embeddings, stacks, further modules and head, added up."""

from pretrain.config.model import GENERATOR
from pretrain.config.model.parts import block, embedding, further_tokens, head, norm, position, values
from pretrain.config.model.parts.counts import NamedWeight, Weights, linear
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
            for weight in TransformerCounts(model.generator).weights():
                if not weight.name.startswith(model.generator_reads):
                    is_table = weight.is_table and weight.group != "head"
                    own = weight._replace(name=GENERATOR + weight.name, group="generator", is_table=is_table)
                    yield own


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
