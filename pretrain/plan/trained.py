"""The trained parameters of a model: all, all but `init.freeze`, or LoRA adapters and what is trained with them.

all             weights, gradients, optimizer state and checkpoints count every parameter
init.freeze     weights and checkpoints count all; gradients, masters and moments what is left
finetune: lora  weights count all and the adapters; the rest counts adapters and what is trained with them
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from pretrain.config.finetune import FinetuneConfig, check_patterns, matches
from pretrain.config.recurrent import AnyModelConfig
from pretrain.errors import ConfigError
from pretrain.plan.params import Shape, parameter_shapes

_OUTSIDE = frozenset({"embedding", "position", "token_type", "head"})
"""Name parts of lookup tables and of the output projection."""


@dataclass(frozen=True, slots=True)
class TrainableSubset:
    """The trained part of a model that is not trained as a whole."""

    names: frozenset[str]  # trained parameters of the model
    layers: frozenset[str]  # linear layers that have an adapter
    finetune: FinetuneConfig  # rank and dropout of the adapters
    full_values: int  # number of values of `names`
    adapter_values: int  # number of values of the adapters
    saves_all: bool  # checkpoints contain frozen parameters too

    @property
    def values(self) -> int:
        """Number of trained values."""
        return self.full_values + self.adapter_values


@dataclass(frozen=True, slots=True)
class Values:
    """Numbers of values of a model."""

    weights: int  # all weights, with adapters
    trained: int  # those with a gradient and optimizer state
    hidden: int  # trained values of matrices between embedding and head, which Muon steps
    saved: int  # weights in a checkpoint


def count_values(model: AnyModelConfig, trained: TrainableSubset | None) -> Values:
    """Counts the values of a model whose vocabulary and labels are known. `trained=None`: all are trained."""
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
    """Returns the trained parameters of a run; None: all of the model.

    A head of labels counts as new, and so as trained with the adapters: the start is not read.

    Args:
        model: Model whose vocabulary and labels are known.
        freeze: Patterns of `init.freeze`.
        finetune: Adapters, and the parameters to train with them.

    Raises:
        ConfigError: A pattern matches nothing, or nothing is left to train.
    """
    if finetune.kind == "full" and not freeze:
        return None
    shapes = parameter_shapes(model)
    if finetune.kind == "lora":
        return _plan_adapters(shapes, finetune, new_head=model.head.kind == "labels")
    check_patterns("init.freeze", freeze, shapes)
    names = frozenset(name for name in shapes if not matches(name, freeze))
    if not names:
        raise ConfigError(f"init.freeze={list(freeze)} leaves nothing to train", fix="name fewer parameters")
    return TrainableSubset(names, frozenset(), finetune, _count(shapes, names), 0, saves_all=True)


def _plan_adapters(shapes: dict[str, Shape], finetune: FinetuneConfig, *, new_head: bool) -> TrainableSubset:
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
    """True for a parameter that Muon steps (`optim/build.py` asks the built model)."""
    return len(shape) == 2 and _OUTSIDE.isdisjoint(name.split("."))


def _is_adaptable(name: str, shape: Shape) -> bool:
    """True for the weight of a linear layer of a block."""
    return ".blocks." in name and len(shape) == 2


def _count(shapes: dict[str, Shape], names: Collection[str]) -> int:
    return sum(math.prod(shapes[name]) for name in names)
