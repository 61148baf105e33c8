"""Vocabulary of the counts of a part.

weights    names and shapes of its parameters, with what a stage asks of each
flops      products with weights, and of attention, added to a `FlopCounter`; returned is whether
           the result has a gradient
kept       bytes that autograd keeps of a token of a `MicroBatch`, and of these the results of products
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
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


class FlopCounter:
    """Products of a row in the order of computation, and whether a gradient reaches each."""

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        trained: Collection[str],
        adapted: Collection[str] = (),
        rank: int = 0,
        window: int | None = None,
    ) -> None:
        """Counts a model of these parameters.

        Args:
            shapes: All parameters.
            trained: Names of parameters with a gradient.
            adapted: Names of linear layers that have an adapter.
            rank: Rank of these adapters.
            window: Attention window of the step, beside those of layers. None: no limit.
        """
        self.shapes = shapes
        self.window = window
        self.whole: Counter[str] = Counter()  # forward and backward pass, by kind of product
        self.forward: Counter[str] = Counter()  # forward pass alone
        self._trained = trained
        self._adapted = adapted
        self._rank = rank

    def add(self, kind: str, products: int, gradients: int) -> None:
        """Adds a product of so many multiplications, and as many gradients of it."""
        self.whole[kind] += 2 * products * (1 + gradients)
        self.forward[kind] += 2 * products

    def has(self, *names: str) -> bool:
        """Returns True if one of these parameters is trained."""
        return any(name in self._trained for name in names)

    def norm(self, name: str, reads: bool) -> bool:
        """Passes a norm, which has no products."""
        return reads or self.has(f"{name}.weight", f"{name}.bias")

    def linear(self, name: str, tokens: int, reads: bool, kind: str = "projections") -> bool:
        """Adds a linear layer and its adapter; `reads`: its input has a gradient."""
        *_, outputs, inputs = self.shapes[f"{name}.weight"]
        weight = self.has(f"{name}.weight")
        adapted = name in self._adapted
        self.add(kind, inputs * outputs * tokens, reads + weight)
        if adapted:
            self.add(kind, self._rank * inputs * tokens, reads + 1)
            self.add(kind, self._rank * outputs * tokens, 2)
        return reads or weight or adapted or self.has(f"{name}.bias")

    def mix(self, products: int, query: bool, key: bool, value: bool, bias: bool = False) -> bool:
        """Adds scores and mixing of attention, each of so many products."""
        scores = query or key or bias
        self.add("attention", products, query + key)
        self.add("attention", products, scores + value)
        return scores or value


class RowTokens(NamedTuple):
    """Tokens of a row that a block reads."""

    tokens: int
    source: int | None = None  # tokens of the source, for cross attention. None: it has none
    is_encoded: bool = False  # the output of the encoder has a gradient


STATISTIC = 4
"""Bytes of a mean, a standard deviation or a log-sum-exp: fp32 in every precision."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of a stack on a rank, and the way in which an engine runs them."""

    rows: int
    length: int  # columns of a row
    source_length: int  # columns of the encoder's output that cross attention reads. 0: it has none
    causal: bool
    compute: int  # bytes of operands and results of matrix products and attention
    residual: int  # bytes of the stream between blocks, and of inputs of norms: fp32 under autocast
    on_cpu: bool  # no fused kernels for RMSNorm, and none for dropout of attention weights
    compiles: bool
    tiles: int = 1  # parts in which feed-forward layers run
    sequence: int = 1  # ranks that share a row
    tensor: int = 1  # ranks that share matrices, and a row
    shares_experts: bool = False

    @property
    def tokens(self) -> int:
        """Tokens on this rank."""
        return self.rows * self.length

    @property
    def copied(self) -> int:
        """Bytes of the copy that autocast makes of each value of a weight; 0: it makes none."""
        return self.compute if self.compute != self.residual else 0

    @property
    def exact(self) -> int:
        """Bytes that a norm step by step keeps of a value: what it divided in fp32, and its result."""
        return 4 if self.compute == 4 else 8


class Kept(NamedTuple):
    """Bytes kept for the backward pass."""

    whole: int
    products: int = 0  # results of matrix products and attention among them
