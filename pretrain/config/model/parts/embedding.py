"""Inputs of a Transformer: tables of tokens and of n-grams, patches of images, and what joins two stacks."""

from pretrain.config.model.parts.counts import FlopCounter, NamedWeight, Weights, linear
from pretrain.config.model.transformer import ModelConfig


def patches_name(model: ModelConfig) -> str:
    """Returns the name of the module that projects patches."""
    return "patches" if model.captions else "embedding"


def weights(model: ModelConfig) -> Weights:
    """Yields the parameters before and between the stacks."""
    group = "embedding"
    width = model.last_stack.table_width
    if model.input is None or model.captions:
        shape = (model.padded_vocab_size, width)
        yield NamedWeight("embedding.weight", shape, group, is_cut=True, is_table=True)
    if model.ngram_embeddings:
        rows = model.ngram_embeddings * model.ngram_rows
        yield NamedWeight("ngram_embedding.weight", (rows, width), group)
    if model.input is not None:
        name = patches_name(model)
        yield from linear(f"{name}.projection", model.input.patch_values, model.input_stack.width, True, group)
        if model.input.num_before:
            yield NamedWeight(f"{name}.before.weight", (model.input.num_before, model.input_stack.width), group)
    if model.has_bridge:
        yield from linear("bridge", model.input_stack.width, model.last_stack.width, True, group)
    if model.restores:
        yield NamedWeight("mask.weight", (1, model.last_stack.width), group)


def has_gradient(count: FlopCounter, model: ModelConfig, name: str) -> bool:
    """Returns True if a table is trained whose vectors the stack of this name reads."""
    if model.captions and name == "encoder":
        return count.has("patches.before.weight")
    tables = ("embedding.weight", "embedding.before.weight", "ngram_embedding.weight")
    return count.has(*tables, f"{name}.token_type.weight")
