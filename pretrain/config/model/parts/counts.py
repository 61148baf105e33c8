"""Vocabulary of the counts of a part.

weights    names and shapes of its parameters, with what a stage asks of each
"""

from collections.abc import Iterator
from typing import NamedTuple

Shape = tuple[int, ...]

GROUPS = (
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
"""Rows of a table of parameters."""


class NamedWeight(NamedTuple):
    """A parameter by its name in the built model."""

    name: str
    shape: Shape
    group: str  # one of `GROUPS`
    is_cut: bool = False  # `parallel.tensor` divides it among ranks
    is_table: bool = False  # a row for each token: an embedding, or the scores of a vocabulary
    fused: tuple[int, ...] = ()  # rows of each matrix, of several that are one parameter
    experts: tuple[int, int] | None = None  # experts that a token chooses, and all that it has. None: not theirs


Weights = Iterator[NamedWeight]


def linear(
    name: str,
    inputs: int,
    outputs: int,
    bias: bool,
    group: str,
    *,
    cut: str = "",
    fused: tuple[int, ...] = (),
) -> Weights:
    """Yields the weight and bias of a linear layer; `cut` by `rows` takes the bias too, by `columns` not."""
    yield NamedWeight(f"{name}.weight", (outputs, inputs), group, is_cut=bool(cut), fused=fused)
    if bias:
        yield NamedWeight(f"{name}.bias", (outputs,), group, is_cut=cut == "rows")
