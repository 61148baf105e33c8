"""Names, shapes and counts of the parameters that `pretrain.model` builds, and of the trained ones.

all             weights, gradients, optimizer state and checkpoints count every parameter
init.freeze     weights and checkpoints count all; gradients, masters and moments what is left
finetune: lora  weights count all and the adapters; the rest counts adapters and what is trained with them
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from pretrain.config.finetune import FinetuneConfig, check_patterns, matches
from pretrain.config.model import (
    AnyModelConfig,
    ExpertsConfig,
    LatentConfig,
    ModelConfig,
    RecurrentConfig,
    RecurrentStackConfig,
    StackConfig,
)
from pretrain.config.optim import SOAP_MAX_SIDE
from pretrain.errors import ConfigError

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]

_GATES = {"rnn": 1, "gru": 3, "lstm": 4}


def decoder_input_width(model: RecurrentConfig) -> int:
    """Returns the width of the decoder's input: a token, and attention where that is fed back."""
    return model.decoder.width * (2 if model.feeds_back else 1)


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> Named:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, stack: StackConfig, is_there: bool = True, width: int | None = None) -> Named:
    if is_there:
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
            yield f"{name}.query_norm.weight", (stack.qk_norm_width(stack.heads),)
            yield f"{name}.key_norm.weight", (stack.qk_norm_width(stack.num_kv_heads),)
        if stack.attention_sinks:
            yield f"{name}.sinks", (stack.heads,)
        if parts > 1:
            yield f"{name}.value_mix", (parts,)
    yield from _linear(f"{name}.output", heads, stack.width, stack.has_output_bias)


def _block(name: str, stack: StackConfig, number: int, *, reads_encoder: bool) -> Named:
    if stack.residual_scalars and number > 0:
        yield f"{name}.residual_mix", (2,)
    if not (number == 0 and stack.norm_placement == "pre" and stack.input_norm):
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
    yield from _norm(f"{name}.input_norm", stack, stack.input_norm, stack.table_width)
    if stack.embedding_width:
        yield from _linear(f"{name}.expand", stack.embedding_width, stack.width, True)
    for number in range(stack.layers):
        yield from _block(f"{name}.blocks.{number}", stack, number, reads_encoder=reads_encoder)
    yield from _norm(f"{name}.norm", stack, stack.norm_placement != "post")


def _head(model: ModelConfig) -> Named:
    if model.head.kind == "none":
        return
    stack = model.last_stack
    if model.head.transform:
        yield from _linear("head.transform", stack.width, model.head_width, stack.bias)
        if model.head.kind != "replaced":
            yield from _norm("head.norm", stack, width=model.head_width)
    if not model.tied_embeddings:
        yield "head.weight", (model.num_head_rows, model.head_width)
    if model.head.bias:
        yield "head.bias", (model.num_head_rows,)


def _cells(name: str, stack: RecurrentStackConfig, input_width: int) -> Named:
    directions = ("", "_reverse") if stack.bidirectional else ("",)
    hidden = stack.width // len(directions)
    rows = _GATES[stack.cell] * hidden
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
    found |= _head(model)
    if model.pooler:
        found |= _linear("pooler", model.last_stack.width, model.last_stack.width, True)
    return found


PARTS = (
    # Token tables, padded rows included, those of values too, and tables of token types; of images the
    # projection of patches, class token and registers, the vector of hidden ones, and the bridge; of
    # tables narrower than their stack the projection to its width.
    "embedding",
    "position",  # tables of learned positions, or of biases by distance
    # Projections of all attention layers, with biases, and factors of values, residuals and results.
    "attention",
    "feedforward",  # projections of all feed-forward layers, with biases
    "norm",  # all norms of the stacks
    "head",  # output projection unless tied, its bias, and the layers before it
    "pooler",  # pooler of a document
    "recurrent",  # recurrent cells, with both of torch's biases
)
"""Parts of a model."""


def _part_of(name: str) -> str:
    words = name.split(".")
    if words[0] in ("head", "pooler"):
        return words[0]
    if words[-2].endswith("norm"):
        return "norm"
    if words[-2] in ("token_type", "bridge", "mask", "expand", "ngram_embedding") or not {
        "value_embedding",
        "patches",
    }.isdisjoint(words):
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
    return _count(shapes, shapes)


def count_active(model: AnyModelConfig) -> int:
    """Returns the number of parameters that a token meets: of the experts, those it chooses."""
    experts = model.last_stack.experts if isinstance(model, ModelConfig) else None
    idle = 0
    if experts is not None:
        shapes = parameter_shapes(model)
        idle = _count(shapes, names_of_experts(shapes)) // experts.count * (experts.count - experts.top_k)
    return count_parameters(model) - idle


def names_of_experts(shapes: dict[str, Shape]) -> set[str]:
    """Returns the names of the matrices of experts, and of their biases."""
    ours = {name for name, shape in shapes.items() if len(shape) == 3}
    return ours | ({f"{name.removesuffix('weight')}bias" for name in ours} & shapes.keys())


def _count(shapes: dict[str, Shape], names: Collection[str]) -> int:
    return sum(math.prod(shapes[name]) for name in names)


@dataclass(frozen=True, slots=True)
class TrainableSubset:
    """The trained part of a model that is not trained as a whole."""

    names: frozenset[str]  # trained parameters of the model
    layers: frozenset[str]  # linear layers that have an adapter
    finetune: FinetuneConfig  # rank and dropout of the adapters
    adapter_values: int  # number of values of the adapters
    saves_all: bool  # checkpoints contain frozen parameters too


@dataclass(frozen=True, slots=True)
class Values:
    """Numbers of values of a model."""

    weights: int  # all weights, with adapters
    trained: int  # those with a gradient and optimizer state
    hidden: int  # trained values of matrices between embedding and head, which Muon steps
    saved: int  # weights in a checkpoint
    sides: int = 0  # squares of the sides of trained hidden matrices, the sizes of SOAP's factors
    experts: int = 0  # trained values of experts, without shared ones and routers


_OUTSIDE = frozenset({"embedding", "patches", "value_embedding", "position", "token_type", "mask"})
_OUTSIDE |= {"ngram_embedding", "head", "router"}
"""Name parts of matrices that Muon does not step (`optim/build.py`)."""


def count_values(model: AnyModelConfig, trained: TrainableSubset | None) -> Values:
    """Counts the values of a model whose vocabulary is known. `trained=None`: all are trained."""
    shapes = parameter_shapes(model)
    total = _count(shapes, shapes)
    names = shapes.keys() if trained is None else trained.names
    matrices = [name for name in names if len(shapes[name]) >= 2]
    inside = [name for name in matrices if _OUTSIDE.isdisjoint(name.split("."))]
    hidden = _count(shapes, inside)
    sides = sum(_squares(block) for name in inside for block in _blocks(name, shapes[name], model))
    experts = _count(shapes, names_of_experts(shapes) & set(names))
    if trained is None:
        return Values(total, total, hidden, total, sides, experts)
    rank = trained.finetune.rank
    for outputs, inputs in (shapes[f"{layer}.weight"] for layer in trained.layers):
        sides += _squares((rank, inputs)) + _squares((outputs, rank))
    values = _count(shapes, trained.names) + trained.adapter_values
    vectors = _count_norms(shapes, trained.layers, trained.finetune)
    return Values(
        weights=total + trained.adapter_values,
        trained=values,
        hidden=hidden + trained.adapter_values - vectors,
        saved=total if trained.saves_all else values,
        sides=sides,
        experts=experts,
    )


def _count_norms(shapes: Mapping[str, Shape], layers: Collection[str], finetune: FinetuneConfig) -> int:
    """Returns the trained norms of the rows of adapted matrices, which DoRA alone has."""
    return sum(shapes[f"{layer}.weight"][0] for layer in layers) if finetune.dora else 0


def _squares(shape: Shape) -> int:
    return sum(side * side for side in shape if side <= SOAP_MAX_SIDE)


def _blocks(name: str, shape: Shape, model: AnyModelConfig) -> list[Shape]:
    """Returns the shapes of the matrices of a fused weight, as `optim/groups.py` steps them."""
    *parents, _ = name.split(".")
    layer = parents[-1]
    stack = getattr(model, parents[0], None)
    *experts, height, columns = shape
    if layer == "qkv" and isinstance(stack, StackConfig):
        rows = [number * stack.per_head_width for number in (stack.heads, stack.num_kv_heads, stack.num_kv_heads)]
    else:
        parts = 2 if layer in ("gate_up", "key_value") else 1
        if layer == "rnn" and isinstance(stack, RecurrentStackConfig):
            parts = _GATES[stack.cell]
        rows = [height // parts] * parts * math.prod(experts)
    return [(number, columns) for number in rows]


def plan_trained(model: AnyModelConfig, freeze: Collection[str], finetune: FinetuneConfig) -> TrainableSubset | None:
    """Returns the trained parameters of a run by `init.freeze` and `finetune`; None: all.

    Adapters are A [rank, inputs] and B [outputs, rank] of each layer (Hu et al. 2022, 4.1), and of
    DoRA a norm of each output. A head
    of labels counts as new, and so as trained with them: the start is not read.

    Raises:
        ConfigError: A pattern matches nothing, or nothing is left to train.
    """
    if finetune.kind == "full" and not freeze:
        return None
    shapes = parameter_shapes(model)
    if finetune.kind == "full":
        check_patterns("init.freeze", freeze, shapes)
        names = frozenset(name for name in shapes if not matches(name, freeze))
        if not names:
            what = f"init.freeze={list(freeze)} leaves nothing to train"
            raise ConfigError(what, fix="name fewer parameters")
        return TrainableSubset(names, frozenset(), finetune, 0, saves_all=True)
    in_blocks = [name for name, shape in shapes.items() if ".blocks." in name and len(shape) == 2]
    linear = [name.removesuffix(".weight") for name in in_blocks]
    check_patterns("finetune.targets", finetune.targets, linear, "linear layer of a block")
    check_patterns("finetune.also", finetune.also, shapes)
    layers = frozenset(name for name in linear if matches(name, finetune.targets))
    also = [*finetune.also, *(["head.*"] if model.head.num_scores else [])]
    names = frozenset(name for name in shapes if matches(name, also))
    adapters = sum(finetune.rank * sum(shapes[f"{layer}.weight"]) for layer in layers)
    adapters += _count_norms(shapes, layers, finetune)
    return TrainableSubset(names, layers, finetune, adapters, saves_all=False)


_KEPT_STATES = {"rnn": 1, "gru": 7, "lstm": 16}
"""State vectors that a step keeps on a CPU: gates before and after, state, and products of both."""


def cell_elements(stack: RecurrentStackConfig, input_width: int) -> int:
    """Returns the values a position that the layers of a recurrent stack keep for the backward pass."""
    inputs = input_width + stack.width * (stack.layers - 1)
    states = stack.layers * _KEPT_STATES[stack.cell] * stack.width
    return inputs + states + (2 * stack.width if stack.dropout else 0)
