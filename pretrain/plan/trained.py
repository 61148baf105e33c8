"""The names and shapes of a model's parameters, from its config: those of the model that is built, in no order.

Patterns of the config (`init.freeze`, `finetune.targets`) are about names: what is trained is counted with these. What
all of a model weighs is counted faster by parts (`params.py`); a test compares both with the built model.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pretrain.config.finetune import FinetuneConfig, check_patterns, matches
from pretrain.config.model import ModelConfig, StackConfig
from pretrain.config.recurrent import AnyModelConfig, RecurrentConfig, RecurrentStackConfig
from pretrain.errors import ConfigError
from pretrain.plan.params import cell_matrices, decoder_input_width

Shape = tuple[int, ...]

Named = Iterator[tuple[str, Shape]]


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


def _cells(name: str, stack: RecurrentStackConfig, input_width: int) -> Named:
    directions = ("", "_reverse") if stack.bidirectional else ("",)
    places = [f"l{layer}{direction}" for layer in range(stack.layers) for direction in directions]
    matrices = list(cell_matrices(stack, input_width))
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


# What of a model is trained: all of it, all but `init.freeze`, or adapters and what goes beside
# them.
#
# all             weights, gradients, optimizer state and checkpoints count every parameter
# init.freeze     weights and checkpoints count all; gradients, masters and moments what is left
# finetune: lora  weights count all and the adapters; everything else the adapters and what is trained beside them


_OUTSIDE = frozenset({"embedding", "position", "token_type", "head"})

"""Parts of the names of matrices that are looked up in, or that make scores."""


@dataclass(frozen=True, slots=True)
class TrainableSubset:
    """What is trained of a model that is not trained as a whole.

    Attributes:
        names: Parameters of the model that are trained, in full.
        layers: Linear layers that have an adapter.
        finetune: Rank and dropout of the adapters.
        full_values: Values of `names`.
        adapter_values: Values of the adapters.
        saves_all: Checkpoints hold what is frozen too.
    """

    names: frozenset[str]
    layers: frozenset[str]
    finetune: FinetuneConfig
    full_values: int
    adapter_values: int
    saves_all: bool

    @property
    def values(self) -> int:
        """How many values are trained."""
        return self.full_values + self.adapter_values


@dataclass(frozen=True, slots=True)
class Values:
    """How many values there are.

    Attributes:
        weights: In the model, those of adapters too.
        trained: Have a gradient and optimizer state.
        hidden: Of those trained, are in matrices between embedding and head: Muon steps these.
        saved: Are weights in a checkpoint.
    """

    weights: int
    trained: int
    hidden: int
    saved: int


def count_values(model: AnyModelConfig, trained: TrainableSubset | None) -> Values:
    """Counts the values of a model, its vocabulary and labels known, of which some are trained. None: all are."""
    shapes = parameter_shapes(model)
    total = _count(shapes, shapes)
    names = {name for name in shapes if trained is None or name in trained.names}
    hidden = _count(shapes, {name for name in names if _is_hidden(name, shapes[name])})
    if trained is None:
        return Values(total, total, hidden, total)
    return Values(
        weights=total + trained.adapter_values,
        trained=trained.values,
        hidden=hidden + trained.adapter_values,
        saved=total if trained.saves_all else trained.values,
    )


def plan_trained(model: AnyModelConfig, freeze: Collection[str], finetune: FinetuneConfig) -> TrainableSubset | None:
    """Returns what a run trains; None: all of the model.

    A head of labels is counted as new, and so as trained beside adapters: whether the start has it is not looked up.

    Args:
        model: Its vocabulary and labels known.
        freeze: `init.freeze`.
        finetune: Whether adapters are trained, and beside what.

    Raises:
        ConfigError: A pattern names nothing, or nothing is left to be trained.
    """
    if finetune.kind == "full" and not freeze:
        return None
    shapes = parameter_shapes(model)
    if finetune.kind == "lora":
        return _beside(shapes, finetune, new_head=model.head.kind == "labels")
    check_patterns("init.freeze", freeze, shapes)
    names = frozenset(name for name in shapes if not matches(name, freeze))
    if not names:
        raise ConfigError(f"init.freeze={list(freeze)} leaves nothing to train", fix="name fewer parameters")
    return TrainableSubset(names, frozenset(), finetune, _count(shapes, names), 0, saves_all=True)


def _beside(shapes: dict[str, Shape], finetune: FinetuneConfig, *, new_head: bool) -> TrainableSubset:
    """Counts adapters: A [rank, inputs] and B [outputs, rank] of each layer (Hu et al. 2022, 4.1)."""
    linear = [name.removesuffix(".weight") for name, shape in shapes.items() if _is_adaptable(name, shape)]
    check_patterns("finetune.targets", finetune.targets, linear, "linear layer of a block")
    check_patterns("finetune.also", finetune.also, shapes)
    layers = frozenset(name for name in linear if matches(name, finetune.targets))
    also = [*finetune.also, *(["head.*"] if new_head else [])]
    names = frozenset(name for name in shapes if matches(name, also))
    adapters = sum(finetune.rank * sum(shapes[f"{layer}.weight"]) for layer in layers)
    return TrainableSubset(names, layers, finetune, _count(shapes, names), adapters, saves_all=False)


def _is_hidden(name: str, shape: Shape) -> bool:
    """Whether a parameter is one of those that Muon steps (`optim/muon.py`, which asks the built model)."""
    return len(shape) == 2 and _OUTSIDE.isdisjoint(name.split("."))


def _is_adaptable(name: str, shape: Shape) -> bool:
    """Whether a parameter is the weight of a linear layer of a block."""
    return ".blocks." in name and len(shape) == 2


def _count(shapes: dict[str, Shape], names: Collection[str]) -> int:
    return sum(math.prod(shapes[name]) for name in names)
