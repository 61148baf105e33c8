"""Counts of the trained parameters of a run, which need not be all of its model.

all             weights, gradients, optimizer state and checkpoints count every parameter
init.freeze     weights and checkpoints count all; gradients, masters and moments what is left
finetune: lora  weights count all and the adapters; the rest counts adapters and what is trained with them
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pretrain.config.engine import EngineConfig
from pretrain.config.finetune import FinetuneConfig, check_patterns, matches
from pretrain.config.lengths import RowLengths
from pretrain.config.model import AnyModelConfig
from pretrain.config.model.parts.counts import NamedWeight, Shape
from pretrain.errors import ConfigError
from pretrain.kinds.optimizer import LONGEST_SQUARED
from pretrain.plan.params import (
    count_names,
    names_of_experts,
    names_of_matrices,
    names_of_tables,
    parameter_shapes,
    weights_of,
)


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
    matrices: int = 0  # trained values of what `parallel.tensor` cuts
    quantized: int = 0  # frozen values in 4 bits


_OUTSIDE = frozenset({"embedding", "patches", "value_embedding", "position", "token_type", "mask"})
_OUTSIDE |= {"ngram_embedding", "head", "router"}
"""Name parts of matrices that Muon does not step (`optim/groups.py`)."""


def count_values(model: AnyModelConfig, trained: TrainableSubset | None) -> Values:
    """Counts the values of a model whose vocabulary is known. `trained=None`: all are trained."""
    weights = weights_of(model)
    shapes = parameter_shapes(model)
    total = count_names(shapes, shapes)
    names = shapes.keys() if trained is None else trained.names
    inside = [name for name in names if len(shapes[name]) >= 2 and _OUTSIDE.isdisjoint(name.split("."))]
    hidden = count_names(shapes, inside)
    sides = sum(_squares(block) for name in inside for block in _matrices(weights[name]))
    cuts = (names_of_experts(model), names_of_matrices(model))
    experts, matrices_cut = (count_names(shapes, cut & set(names)) for cut in cuts)
    if trained is None:
        return Values(total, total, hidden, total, sides, experts, matrices_cut)
    rank = trained.finetune.rank
    for outputs, inputs in (shapes[f"{layer}.weight"] for layer in trained.layers):
        sides += _squares((rank, inputs)) + _squares((outputs, rank))
    values = count_names(shapes, trained.names) + trained.adapter_values
    quantized = 0
    if trained.finetune.quantize != "none":
        quantized = count_names(shapes, [f"{layer}.weight" for layer in trained.layers])
    vectors = _count_norms(shapes, trained.layers, trained.finetune)
    return Values(
        weights=total + trained.adapter_values,
        trained=values,
        hidden=hidden + trained.adapter_values - vectors,
        saved=total if trained.saves_all else values,
        sides=sides,
        experts=experts,
        matrices=matrices_cut,
        quantized=quantized,
    )


def _count_norms(shapes: Mapping[str, Shape], layers: Collection[str], finetune: FinetuneConfig) -> int:
    return sum(shapes[f"{layer}.weight"][0] for layer in layers) if finetune.dora else 0


def _squares(shape: Shape) -> int:
    return sum(side * side for side in shape if side <= LONGEST_SQUARED)


def _matrices(weight: NamedWeight) -> list[Shape]:
    *experts, height, columns = weight.shape
    rows = weight.fused or (height,) * math.prod(experts)
    return [(number, columns) for number in rows]


def train_new_tokens(model: AnyModelConfig, finetune: FinetuneConfig) -> FinetuneConfig:
    """Returns the settings for data with new tokens: the tables of tokens in `also`, if to be trained."""
    if finetune.new_tokens == "frozen":
        return finetune
    names = [name for name in names_of_tables(model) if not matches(name, finetune.also)]
    return finetune.model_copy(update={"also": [*finetune.also, *names]})


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
    if finetune.kind != "full":
        return _plan_adapters(model, shapes, finetune)
    check_patterns("init.freeze", freeze, shapes)
    names = frozenset(name for name in shapes if not matches(name, freeze))
    if not names:
        text = f"init.freeze={list(freeze)} leaves nothing to train"
        raise ConfigError(text, fix="name fewer parameters")
    return TrainableSubset(names, frozenset(), finetune, 0, saves_all=True)


def _plan_adapters(model: AnyModelConfig, shapes: Mapping[str, Shape], finetune: FinetuneConfig) -> TrainableSubset:
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


def adapter_bytes(
    model: AnyModelConfig, trained: TrainableSubset, engine: EngineConfig, lengths: RowLengths, micro: int
) -> int:
    """Counts the result of A; B's for `selective`, else under dropout A's input and its mask."""
    mode = engine.activation_checkpointing
    if mode == "full":
        return 0
    shapes = parameter_shapes(model)
    total = 0
    for layer in trained.layers:
        outputs, inputs = shapes[f"{layer}.weight"]
        reads_source = layer.startswith("encoder.") or layer.endswith("cross.key_value")
        tokens = micro * ((lengths.source if reads_source else None) or lengths.target)
        further = outputs if mode == "selective" else 2 * inputs if trained.finetune.dropout else 0
        total += tokens * (trained.finetune.rank + further)
    return total * engine.compute_bytes
