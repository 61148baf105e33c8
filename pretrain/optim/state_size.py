"""How much state an optimizer is going to keep, known before there is any: for the room that checkpoints take."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pretrain.optim.groups import ParameterGroup
from pretrain.optim.muon import split_hidden


@dataclass(frozen=True, slots=True)
class StateSize:
    """What an optimizer keeps, step counts aside.

    Attributes:
        elements: fp32 numbers.
        tensors: That they are saved in, by a rank that has all.
    """

    elements: int
    tensors: int


def state_size(groups: Sequence[ParameterGroup], kind: str) -> StateSize:
    """Returns the size of the state of an optimizer over some groups.

    Args:
        groups: Of all that is trained.
        kind: `optim.kind`; one that is not known here counts as AdamW.
    """
    sizes = list(_SIZES.get(kind, _adamw)(groups))
    return StateSize(sum(sizes), len(sizes))


def _adamw(groups: Iterable[ParameterGroup]) -> list[int]:
    """Two moments a parameter."""
    parameters = [sum(map(math.prod, blocks)) for group in groups for blocks in group.blocks]
    return [*parameters, *parameters]


def _muon(groups: Iterable[ParameterGroup]) -> list[int]:
    """One momentum a hidden matrix, two moments for each other parameter."""
    split = [split_hidden(group) for group in groups]
    momenta = [math.prod(shape) for hidden, _ in split for blocks in hidden.blocks for shape in blocks]
    return [*momenta, *_adamw(rest for _, rest in split)]


def _adafactor(groups: Iterable[ParameterGroup]) -> list[int]:
    """A row and a column a matrix, one variance an element of a vector."""
    shapes = [shape for group in groups for blocks in group.blocks for shape in blocks]
    factors = [(shape[0], shape[1]) if len(shape) == 2 else (math.prod(shape),) for shape in shapes]
    return [size for factor in factors for size in factor]


_SIZES: dict[str, Callable[[Iterable[ParameterGroup]], list[int]]] = {
    "adamw": _adamw,
    "adafactor": _adafactor,
    "muon": _muon,
}
