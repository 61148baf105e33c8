"""Numbers of parameters, added up over the parts of a model (`pretrain/config/model/parts/`)."""

import math
from collections.abc import Collection

from pretrain.config.model import AnyModelConfig
from pretrain.config.model.parts import counts_of
from pretrain.config.model.parts.counts import GROUPS, NamedWeight, Shape


def weights_of(model: AnyModelConfig) -> dict[str, NamedWeight]:
    """Returns every parameter by its name; a shared one has its first name only.

    The vocabulary size, and the labels of a head of labels, must be known.
    """
    return {weight.name: weight for weight in counts_of(model).weights()}


def parameter_shapes(model: AnyModelConfig) -> dict[str, Shape]:
    """Returns the shape of every parameter by its name, as `weights_of`."""
    return {weight.name: weight.shape for weight in counts_of(model).weights()}


def count_parts(model: AnyModelConfig) -> dict[str, int]:
    """Counts the parameters of each of `GROUPS`; a weight that two parts share counts once."""
    counts = dict.fromkeys(GROUPS, 0)
    for weight in counts_of(model).weights():
        counts[weight.group] += math.prod(weight.shape)
    return counts


def count_parameters(model: AnyModelConfig) -> int:
    """Returns the number of parameters of the built model, with its padded vocabulary."""
    shapes = parameter_shapes(model)
    return count_names(shapes, shapes)


def count_active(model: AnyModelConfig) -> int:
    """Returns the number of parameters that a token meets: of the experts, those it chooses."""
    total = 0
    for weight in counts_of(model).weights():
        chosen, count = weight.experts or (1, 1)
        total += math.prod(weight.shape) // count * chosen
    return total


def names_of_tables(model: AnyModelConfig) -> list[str]:
    """Returns the names of the parameters with a row for each token: embeddings, and its scores."""
    return sorted(weight.name for weight in counts_of(model).weights() if weight.is_table)


def names_of_experts(model: AnyModelConfig) -> set[str]:
    """Returns the names of the matrices of experts, and of their biases."""
    return {weight.name for weight in counts_of(model).weights() if weight.experts}


def names_of_matrices(model: AnyModelConfig) -> set[str]:
    """Returns the names of the parameters that `parallel.tensor` cuts (`model/tensor_parallel.py`)."""
    return {weight.name for weight in counts_of(model).weights() if weight.is_cut}


def count_names(shapes: dict[str, Shape], names: Collection[str]) -> int:
    """Returns the number of values of some parameters."""
    return sum(math.prod(shapes[name]) for name in names)
