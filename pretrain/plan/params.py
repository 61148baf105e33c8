"""Names, shapes and counts of a model's parameters, from its config: exactly those that `pretrain.model` builds."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from pretrain.config.model import ModelConfig, StackConfig
from pretrain.config.recurrent import AnyModelConfig, RecurrentConfig, RecurrentStackConfig

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]

_GATES = {"rnn": 1, "gru": 3, "lstm": 4}


def decoder_input_width(model: RecurrentConfig) -> int:
    """Returns the input width of the decoder's first layer: a token, and the attention output where it is fed back."""
    return model.decoder.width * (2 if model.feeds_back else 1)


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> Named:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, stack: StackConfig) -> Named:
    yield f"{name}.weight", (stack.width,)
    if stack.norm == "layer" and stack.bias:
        yield f"{name}.bias", (stack.width,)


def _attention(name: str, stack: StackConfig) -> Named:
    heads, kv = stack.heads * stack.per_head_width, stack.num_kv_heads * stack.per_head_width
    if name.endswith("cross"):
        yield from _linear(f"{name}.query", stack.width, heads, stack.has_qkv_bias)
        yield from _linear(f"{name}.key_value", stack.width, 2 * kv, stack.has_qkv_bias)
    else:
        yield from _linear(f"{name}.qkv", stack.width, heads + 2 * kv, stack.has_qkv_bias)
        if stack.qk_norm:
            yield f"{name}.query_norm.weight", (stack.per_head_width,)
            yield f"{name}.key_norm.weight", (stack.per_head_width,)
    yield from _linear(f"{name}.output", heads, stack.width, stack.bias)


def _block(name: str, stack: StackConfig, *, reads_encoder: bool, first: bool) -> Named:
    if not (first and stack.norm_placement == "pre" and stack.input_norm):
        yield from _norm(f"{name}.attention_norm", stack)
    yield from _attention(f"{name}.attention", stack)
    if reads_encoder:
        yield from _norm(f"{name}.cross_norm", stack)
        yield from _attention(f"{name}.cross", stack)
    yield from _norm(f"{name}.feedforward_norm", stack)
    up, width = ("gate_up", 2 * stack.ff_width) if stack.gated else ("up", stack.ff_width)
    yield from _linear(f"{name}.feedforward.{up}", stack.width, width, stack.bias)
    yield from _linear(f"{name}.feedforward.down", stack.ff_width, stack.width, stack.bias)


def _stack(name: str, stack: StackConfig, max_seq_len: int, *, reads_encoder: bool) -> Named:
    if stack.position == "learned":
        yield f"{name}.position.weight", (max_seq_len, stack.width)
    elif stack.position == "relative":
        yield f"{name}.position.weight", (stack.relative_buckets, stack.heads)
    if stack.token_types:
        yield f"{name}.token_type.weight", (stack.token_types, stack.width)
    if stack.input_norm:
        yield from _norm(f"{name}.input_norm", stack)
    for number in range(stack.layers):
        yield from _block(f"{name}.blocks.{number}", stack, reads_encoder=reads_encoder, first=number == 0)
    if stack.norm_placement == "pre":
        yield from _norm(f"{name}.norm", stack)


def _head(model: ModelConfig) -> Named:
    if model.head.kind == "none":
        return
    stack = model.last_stack
    if model.head.transform:
        yield from _linear("head.transform", stack.width, stack.width, stack.bias)
        yield from _norm("head.norm", stack)
    if not model.tied_embeddings:
        yield "head.weight", (model.num_head_rows, stack.width)
    if model.head.bias:
        yield "head.bias", (model.num_head_rows,)


def _cell_matrices(stack: RecurrentStackConfig, input_width: int) -> Iterator[tuple[int, int]]:
    """Yields inputs and outputs of each matrix of each layer and direction; with each, torch has a bias."""
    directions = 2 if stack.bidirectional else 1
    hidden = stack.width // directions
    for layer in range(stack.layers):
        for _ in range(directions):
            yield input_width if layer == 0 else stack.width, _GATES[stack.cell] * hidden
            yield hidden, _GATES[stack.cell] * hidden


def _cells(name: str, stack: RecurrentStackConfig, input_width: int) -> Named:
    directions = ("", "_reverse") if stack.bidirectional else ("",)
    places = [f"l{layer}{direction}" for layer in range(stack.layers) for direction in directions]
    matrices = list(_cell_matrices(stack, input_width))
    for place, *pair in zip(places, matrices[::2], matrices[1::2], strict=True):
        for kind, (inputs, outputs) in zip(("ih", "hh"), pair, strict=True):
            yield f"{name}.rnn.weight_{kind}_{place}", (outputs, inputs)
            yield f"{name}.rnn.bias_{kind}_{place}", (outputs,)


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
    """Returns the shape of every parameter by its name; one that two parts share has its first name only.

    Args:
        model: `vocab_size` must be known, and the labels of a head that has some.
    """
    if isinstance(model, RecurrentConfig):
        return dict(_recurrent(model))
    stacks = [(name, stack) for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)) if stack]
    found: dict[str, Shape] = {"embedding.weight": (model.padded_vocab_size, model.last_stack.width)}
    for name, stack in stacks:
        found |= _stack(name, stack, model.max_seq_len, reads_encoder=len(stacks) == 2 and name == "decoder")
    found |= _head(model)
    if model.pooler:
        found |= _linear("pooler", model.last_stack.width, model.last_stack.width, True)
    return found


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters by part; a weight that two parts share counts once."""

    embedding: int  # token table, padded rows included, and tables of token types
    position: int  # tables of learned positions, or of biases by distance
    attention: int  # projections of all attention layers, with biases
    feedforward: int  # projections of all feed-forward layers, with biases
    norm: int  # all norms of the stacks
    head: int  # output projection unless tied to the embedding, its bias, and the layers before it
    pooler: int  # pooler of a sentence
    recurrent: int = 0  # recurrent cells, with both of torch's biases

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(getattr(self, part.name) for part in fields(self))


def _part_of(name: str) -> str:
    parts = name.split(".")
    if parts[0] in ("head", "pooler"):
        return parts[0]
    if parts[-2].endswith("norm"):
        return "norm"
    if parts[-2] in ("embedding", "token_type"):
        return "embedding"
    found = {"position": "position", "rnn": "recurrent", "feedforward": "feedforward"}
    return next((part for word, part in found.items() if word in parts), "attention")


def count_parts(model: AnyModelConfig) -> ParameterCount:
    """Counts the parameters of each part; `vocab_size` must be known."""
    counts = dict.fromkeys((part.name for part in fields(ParameterCount)), 0)
    for name, shape in parameter_shapes(model).items():
        counts[_part_of(name)] += math.prod(shape)
    return ParameterCount(**counts)


def count_parameters(model: AnyModelConfig) -> int:
    """Returns the number of parameters of the built model, with its padded vocabulary."""
    return sum(math.prod(shape) for shape in parameter_shapes(model).values())
