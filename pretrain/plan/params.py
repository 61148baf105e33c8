"""Names, shapes and counts of the parameters that `pretrain.model` builds."""

import math
import re
from collections.abc import Collection, Iterator

from pretrain.config.model import (
    GENERATOR,
    AnyModelConfig,
    ExpertsConfig,
    LatentConfig,
    ModelConfig,
    RecurrentConfig,
    RecurrentStackConfig,
    StackConfig,
)
from pretrain.config.model.stack import predictor_number

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]

CELL_GATES = {"rnn": 1, "gru": 3, "lstm": 4}
"""Matrices of a recurrent cell that are one parameter."""


def decoder_input_width(model: RecurrentConfig) -> int:
    """Returns the width of the decoder's input: a token, and attention where that is fed back."""
    return model.decoder.width * (2 if model.feeds_back else 1)


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> Named:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, stack: StackConfig, is_there: bool = True, width: int | None = None) -> Named:
    if is_there and stack.norm != "unweighted":
        yield f"{name}.weight", (width or stack.width,)
    if is_there and stack.has_norm_bias:
        yield f"{name}.bias", (width or stack.width,)


def _latent(name: str, stack: StackConfig, latent: LatentConfig) -> Named:
    inputs = latent.query_rank or stack.width
    if latent.query_rank is not None:
        yield from _linear(f"{name}.query_down", stack.width, inputs, False)
        yield f"{name}.query_norm.weight", (inputs,)
    yield from _linear(f"{name}.query_up", inputs, stack.heads * stack.per_head_width, False)
    yield from _linear(f"{name}.kv_down", stack.width, latent.kv_rank + latent.rope_width, False)
    yield f"{name}.kv_norm.weight", (latent.kv_rank,)
    kept = stack.per_head_width - latent.rope_width + latent.value_width
    yield from _linear(f"{name}.kv_up", latent.kv_rank, stack.heads * kept, False)
    yield from _linear(f"{name}.output", stack.heads * latent.value_width, stack.width, False)


def _attention(name: str, stack: StackConfig, parts: int = 1) -> Named:
    if stack.latent is not None:
        yield from _latent(name, stack, stack.latent)
        return
    heads = stack.heads * stack.per_head_width
    kv = stack.num_kv_heads * stack.per_head_width
    if name.endswith("cross"):
        yield from _linear(f"{name}.query", stack.width, heads, stack.has_qkv_bias)
        yield from _linear(f"{name}.key_value", stack.width, 2 * kv, stack.has_qkv_bias)
    else:
        yield from _linear(f"{name}.qkv", stack.width, heads + 2 * kv, stack.has_qkv_bias)
        if stack.qk_norm:
            for norm, number in (("query_norm", stack.heads), ("key_norm", stack.num_kv_heads)):
                yield f"{name}.{norm}.weight", (stack.qk_norm_width(number),)
                if stack.has_qk_norm_bias:
                    yield f"{name}.{norm}.bias", (stack.qk_norm_width(number),)
        if stack.attention_sinks:
            yield f"{name}.sinks", (stack.heads,)
        if parts > 1:
            yield f"{name}.value_mix", (parts,)
    yield from _linear(f"{name}.output", heads, stack.width, stack.has_output_bias)


def _block(name: str, stack: StackConfig, number: int, *, reads_encoder: bool) -> Named:
    if stack.residual_scalars and number > 0:
        yield f"{name}.residual_mix", (2,)
    if stack.norms_attention(number):
        yield from _norm(f"{name}.attention_norm", stack)
    yield from _attention(f"{name}.attention", stack, stack.value_parts(number))
    is_sandwich = stack.norm_placement == "sandwich"
    yield from _norm(f"{name}.attention_output_norm", stack, is_sandwich)
    if stack.layer_scale is not None:
        for layer in ("attention", "feedforward", *(["cross"] if reads_encoder else [])):
            yield f"{name}.{layer}_scale", (stack.width,)
    if reads_encoder:
        yield from _norm(f"{name}.cross_norm", stack)
        yield from _attention(f"{name}.cross", stack)
        yield from _norm(f"{name}.cross_output_norm", stack, is_sandwich)
    yield from _norm(f"{name}.feedforward_norm", stack, stack.parallel != "one_norm")
    if stack.experts is not None and stack.has_experts(number):
        yield from _mixture(f"{name}.feedforward", stack, stack.experts)
    else:
        yield from _feedforward(f"{name}.feedforward", stack, stack.ff_width)
    yield from _norm(f"{name}.feedforward_output_norm", stack, is_sandwich)


def _feedforward(name: str, stack: StackConfig, hidden: int) -> Named:
    up, width = ("gate_up", 2 * hidden) if stack.gated else ("up", hidden)
    yield from _linear(f"{name}.{up}", stack.width, width, stack.bias)
    yield from _linear(f"{name}.down", hidden, stack.width, stack.bias)


def _mixture(name: str, stack: StackConfig, experts: ExpertsConfig) -> Named:
    yield from _linear(f"{name}.router", stack.width, experts.count, stack.bias)
    for kind, shape in _feedforward(name, stack, stack.expert_width):
        # Biases of all experts are one vector.
        yield kind, (experts.count, *shape) if len(shape) == 2 else (experts.count * shape[0],)
    if experts.shared:
        yield from _feedforward(f"{name}.shared", stack, experts.shared * stack.expert_width)


def _embedding(model: ModelConfig) -> Named:
    width = model.input_stack.width
    if model.input is None or model.captions:
        yield "embedding.weight", (model.padded_vocab_size, model.last_stack.table_width)
    if model.ngram_embeddings:
        rows = model.ngram_embeddings * model.ngram_rows
        yield "ngram_embedding.weight", (rows, model.last_stack.table_width)
    if model.input is not None:
        name = patches_name(model)
        yield from _linear(f"{name}.projection", model.input.patch_values, width, True)
        if model.input.num_before:
            yield f"{name}.before.weight", (model.input.num_before, width)
    if model.has_bridge:
        yield from _linear("bridge", width, model.last_stack.width, True)
    if model.restores:
        yield "mask.weight", (1, model.last_stack.width)


def patches_name(model: ModelConfig) -> str:
    """Returns the name of the module that projects patches."""
    return "patches" if model.captions else "embedding"


def _stack(name: str, model: ModelConfig, *, reads_encoder: bool) -> Named:
    stack: StackConfig = getattr(model, name)
    if stack.position == "learned":
        rows = model.first_position(name) + model.positions_of(name)
        yield f"{name}.position.weight", (rows, stack.table_width)
    elif stack.position == "relative":
        yield f"{name}.position.weight", (stack.relative_tables * stack.relative_buckets, stack.heads)
    if stack.token_types:
        yield f"{name}.token_type.weight", (stack.token_types, stack.table_width)
    for number in range(stack.value_embeddings):
        width = stack.num_kv_heads * stack.per_head_width
        yield f"{name}.value_embedding.{number}.weight", (model.padded_vocab_size, width)
    yield from _norm(f"{name}.input_norm", stack, bool(stack.input_norm), stack.table_width)
    if stack.embedding_width:
        yield from _linear(f"{name}.expand", stack.embedding_width, stack.width, True)
    for number in range(stack.layers):
        yield from _block(f"{name}.blocks.{number}", stack, number, reads_encoder=reads_encoder)
    yield from _norm(f"{name}.norm", stack, stack.norm_placement != "post")


def _multi_token(model: ModelConfig) -> Named:
    """Yields the modules that predict further tokens, in the order of use."""
    stack = model.last_stack
    for number in range(model.multi_token):
        name = f"multi_token.inputs.{number}"
        yield from _norm(f"{name}.embedding_norm", stack)
        yield from _norm(f"{name}.hidden_norm", stack)
        yield from _linear(f"{name}.projection", 2 * stack.width, stack.width, False)
        like = predictor_number(stack)
        yield from _block(f"multi_token.blocks.{number}", stack, like, reads_encoder=False)
        yield from _norm(f"multi_token.norms.{number}", stack, stack.norm_placement != "post")


def _head(model: ModelConfig) -> Named:
    if model.head.kind == "none":
        return
    stack = model.last_stack
    if model.head.transform:
        yield from _linear("head.transform", stack.width, model.head_width, stack.bias)
        if model.head.record.has_norm:
            yield from _norm("head.norm", stack, width=model.head_width)
    if not model.tied_embeddings:
        yield "head.weight", (model.num_head_rows, model.head_width)
    if model.head.bias:
        yield "head.bias", (model.num_head_rows,)


def _cells(name: str, stack: RecurrentStackConfig, input_width: int) -> Named:
    directions = ("", "_reverse") if stack.bidirectional else ("",)
    hidden = stack.width // len(directions)
    rows = CELL_GATES[stack.cell] * hidden
    for layer in range(stack.layers):
        for direction in directions:
            # torch has a bias with each of the two matrices.
            for kind, inputs in (("ih", stack.width if layer else input_width), ("hh", hidden)):
                yield f"{name}.rnn.weight_{kind}_l{layer}{direction}", (rows, inputs)
                yield f"{name}.rnn.bias_{kind}_l{layer}{direction}", (rows,)


def _recurrent(model: RecurrentConfig) -> Named:
    width = model.decoder.width
    yield "embedding.weight", (model.padded_vocab_size, width)
    if model.encoder is not None:
        yield from _cells("encoder", model.encoder, model.encoder.width)
    yield from _cells("decoder", model.decoder, decoder_input_width(model))
    if model.attention == "bahdanau":
        yield "decoder.score.query.weight", (width, width)
        yield "decoder.score.energy.weight", (1, width)
    if model.attention == "bahdanau" or (model.attention == "luong" and model.score == "general"):
        yield "decoder.score.key.weight", (width, width)
    if model.attention != "none":
        yield "decoder.readout.weight", (width, 2 * width)
    yield from _head(model.head_model)


def parameter_shapes(model: AnyModelConfig) -> dict[str, Shape]:
    """Returns the shape of every parameter by its name; a shared one has its first name only.

    The vocabulary size, and the labels of a head of labels, must be known.
    """
    if isinstance(model, RecurrentConfig):
        return dict(_recurrent(model))
    found: dict[str, Shape] = dict(_embedding(model))
    if model.encoder is not None:
        found |= _stack("encoder", model, reads_encoder=False)
    if model.decoder is not None:
        found |= _stack("decoder", model, reads_encoder=model.reads_encoder)
    found |= _multi_token(model)
    found |= _head(model)
    if model.pooler:
        found |= _linear("pooler", model.last_stack.width, model.last_stack.width, True)
    if model.generator_heads:
        of_generator = parameter_shapes(model.generator).items()
        reads = model.generator_reads
        found |= {GENERATOR + name: shape for name, shape in of_generator if not name.startswith(reads)}
    return found


PARTS = (
    # Token tables, padded rows included, those of values too, and tables of token types; of images the
    # projection of patches, class token and registers, the vector of hidden ones, and the bridge; of
    # tables narrower than their stack the projection to its width; of `multi_token` the projections.
    "embedding",
    "position",  # tables of learned positions, or of biases by distance
    # Projections of all attention layers, with biases, and factors of values, residuals and results.
    "attention",
    "feedforward",  # projections of all feed-forward layers, with biases
    "norm",  # all norms of the stacks
    "head",  # output projection unless tied, its bias, and the layers before it
    "pooler",  # pooler of a document
    "generator",  # own weights of a generator of replaced tokens
    "recurrent",  # recurrent cells, with both of torch's biases
)
"""Parts of a model."""


_IN_EMBEDDING = ("token_type", "bridge", "mask", "expand", "ngram_embedding")


def _part_of(name: str) -> str:
    words = name.split(".")
    if words[0] in ("head", "pooler", "generator"):
        return words[0]
    if words[-2].endswith("norm") or "norms" in words:
        return "norm"
    if words[-2] in _IN_EMBEDDING or {"value_embedding", "patches", "inputs"} & set(words):
        return "embedding"
    if "rnn" in words:
        return "recurrent"
    return next((part for part in ("embedding", "position", "feedforward") if part in words), "attention")


def count_parts(model: AnyModelConfig) -> dict[str, int]:
    """Counts the parameters of each of `PARTS`; a weight that two parts share counts once."""
    counts = dict.fromkeys(PARTS, 0)
    for name, shape in parameter_shapes(model).items():
        counts[_part_of(name)] += math.prod(shape)
    return counts


def count_parameters(model: AnyModelConfig) -> int:
    """Returns the number of parameters of the built model, with its padded vocabulary."""
    shapes = parameter_shapes(model)
    return count_names(shapes, shapes)


def count_active(model: AnyModelConfig) -> int:
    """Returns the number of parameters that a token meets: of the experts, those it chooses."""
    experts = model.last_stack.experts if isinstance(model, ModelConfig) else None
    idle = 0
    if experts is not None:
        shapes = parameter_shapes(model)
        idle = count_names(shapes, names_of_experts(shapes)) // experts.count * (experts.count - experts.top_k)
    return count_parameters(model) - idle


def names_of_tables(model: AnyModelConfig) -> list[str]:
    """Returns the names of the parameters with a row for each token: embeddings, and its scores."""
    named = {"embedding.weight"}
    if model.head.record.scores_words:
        named |= {"head.weight", "head.bias"}
    shapes = parameter_shapes(model)
    return sorted(name for name in shapes if name in named or ".value_embedding." in name)


def names_of_experts(shapes: dict[str, Shape]) -> set[str]:
    """Returns the names of the matrices of experts, and of their biases."""
    ours = {name.removesuffix("weight") for name, shape in shapes.items() if len(shape) == 3}
    return shapes.keys() & {f"{name}{kind}" for name in ours for kind in ("weight", "bias")}


def names_of_matrices(shapes: dict[str, Shape], model: AnyModelConfig) -> set[str]:
    """Returns the names of what `parallel.tensor` cuts (`model/tensor_parallel.py`)."""
    rows = r".*blocks.*\.(qkv|query|key_value|gate_up|up)"
    rows += "|head" if model.head.record.scores_words else ""
    cut = rf"(embedding|.*\.value_embedding.*|.*blocks.*\.(output|down))\.weight|({rows})\.(weight|bias)"
    return {name for name in shapes if re.fullmatch(cut, name)}


def count_names(shapes: dict[str, Shape], names: Collection[str]) -> int:
    """Returns the number of values of some parameters."""
    return sum(math.prod(shapes[name]) for name in names)


_KEPT_STATES = {"rnn": 1, "gru": 7, "lstm": 16}
"""State vectors that a step keeps on a CPU: gates before and after, state, and products of both."""


def cell_elements(stack: RecurrentStackConfig, input_width: int) -> int:
    """Returns the values a position that the layers of a recurrent stack keep for the backward pass."""
    inputs = input_width + stack.width * (stack.layers - 1)
    states = stack.layers * _KEPT_STATES[stack.cell] * stack.width
    return inputs + states + (2 * stack.width if stack.dropout else 0)
