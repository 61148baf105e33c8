"""What of a model is trained: all of it, all but `init.freeze`, or adapters and what goes beside them.

all             weights, gradients, optimizer state and checkpoints count every parameter
init.freeze     weights and checkpoints count all; gradients, masters and moments what is left
finetune: lora  weights count all and the adapters; everything else the adapters and what is trained beside them
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from pretrain.config.finetune import FinetuneConfig
from pretrain.config.patterns import check_patterns, matches
from pretrain.config.recurrent import AnyModelConfig
from pretrain.errors import ConfigError
from pretrain.plan.shapes import Shape, parameter_shapes

_OUTSIDE = frozenset({"embedding", "position", "token_type", "head"})
"""Parts of the names of matrices that are looked up in, or that make scores."""


@dataclass(frozen=True, slots=True)
class Trained:
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


def count_values(model: AnyModelConfig, trained: Trained | None) -> Values:
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


def plan_trained(model: AnyModelConfig, freeze: Collection[str], finetune: FinetuneConfig) -> Trained | None:
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
    return Trained(names, frozenset(), finetune, _count(shapes, names), 0, saves_all=True)


def _beside(shapes: dict[str, Shape], finetune: FinetuneConfig, *, new_head: bool) -> Trained:
    """Counts adapters: A [rank, inputs] and B [outputs, rank] of each layer (Hu et al. 2022, 4.1)."""
    linear = [name.removesuffix(".weight") for name, shape in shapes.items() if _is_adaptable(name, shape)]
    check_patterns("finetune.targets", finetune.targets, linear, "linear layer of a block")
    check_patterns("finetune.also", finetune.also, shapes)
    layers = frozenset(name for name in linear if matches(name, finetune.targets))
    also = [*finetune.also, *(["head.*"] if new_head else [])]
    names = frozenset(name for name in shapes if matches(name, also))
    adapters = sum(finetune.rank * sum(shapes[f"{layer}.weight"]) for layer in layers)
    return Trained(names, layers, finetune, _count(shapes, names), adapters, saves_all=False)


def _is_hidden(name: str, shape: Shape) -> bool:
    """Whether a parameter is one of those that Muon steps (`optim/muon.py`, which asks the built model)."""
    return len(shape) == 2 and _OUTSIDE.isdisjoint(name.split("."))


def _is_adaptable(name: str, shape: Shape) -> bool:
    """Whether a parameter is the weight of a linear layer of a block."""
    return ".blocks." in name and len(shape) == 2


def _count(shapes: dict[str, Shape], names: Collection[str]) -> int:
    return sum(math.prod(shapes[name]) for name in names)
