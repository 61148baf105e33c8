"""Counts of a recurrent model."""

import math

from pretrain.config.model.parts import head
from pretrain.config.model.parts.counts import FlopCounter, NamedWeight, Weights
from pretrain.config.model.parts.stack import StackCounts
from pretrain.config.model.recurrent import RecurrentConfig, RecurrentStackConfig

CELL_GATES = {"rnn": 1, "gru": 3, "lstm": 4}
"""Matrices of a recurrent cell that are one parameter."""


_KEPT_STATES = {"rnn": 1, "gru": 7, "lstm": 16}
"""State vectors that a step keeps on a CPU: gates before and after, state, and products of both."""


class RecurrentCounts:
    """Counts of a recurrent model whose vocabulary is known."""

    def __init__(self, model: RecurrentConfig) -> None:
        self.model = model
        self.stacks: list[StackCounts] = []
        self.generator = None
        self.has_head = True
        self.reads_table_twice = False

    @property
    def _input_width(self) -> int:
        return self.model.decoder.width * (2 if self.model.feeds_back else 1)

    @property
    def width(self) -> int:
        """Width D of states and outputs."""
        return self.model.decoder.width

    head_width = width

    @property
    def num_blocks(self) -> int:
        """Layers of all stacks."""
        return self.model.decoder.layers + (self.model.encoder.layers if self.model.encoder else 0)

    def weights(self) -> Weights:
        """Yields every parameter; a shared one has its first name only."""
        model = self.model
        width = model.decoder.width
        group = "attention"
        yield NamedWeight("embedding.weight", (model.padded_vocab_size, width), "embedding", is_table=True)
        if model.encoder is not None:
            yield from _cell_weights("encoder", model.encoder, model.encoder.width)
        yield from _cell_weights("decoder", model.decoder, self._input_width)
        if model.attention == "bahdanau":
            yield NamedWeight("decoder.score.query.weight", (width, width), group)
            yield NamedWeight("decoder.score.energy.weight", (1, width), group)
        if model.attention == "bahdanau" or (model.attention == "luong" and model.score == "general"):
            yield NamedWeight("decoder.score.key.weight", (width, width), group)
        if model.attention != "none":
            yield NamedWeight("decoder.readout.weight", (width, 2 * width), group)
        yield from head.weights(model.head_model)

    def flops(self, count: FlopCounter, target: int, source: int) -> dict[str, int]:
        """Adds each weight once a token of its side, and two products of width D a pair of tokens.

        All weights count as trained. No block is frozen.
        """
        of_target = self._count_weights("decoder.rnn.weight", "decoder.score.query", "decoder.readout")
        of_source = self._count_weights("encoder.rnn.weight", "decoder.score.key")
        pairs = 0 if self.model.attention == "none" else target * source
        width = self.model.decoder.width
        count.add("projections", of_target * target + of_source * source, 2)
        count.add("attention", 2 * width * pairs, 2)
        count.add("head", self.model.padded_vocab_size * width * target, 2)
        return {}

    def names_in_order(self) -> list[str]:
        """Returns the names of parameters in the order of use."""
        return [weight.name for weight in self.weights()]

    def kept(self, rows: int, target: int, source: int, compute: int) -> int:
        """Returns bytes of cells, head and attention; additive attention keeps a vector a pair of tokens.

        Right to within about a third.
        """
        model, width = self.model, self.width
        elements = target * _cell_elements(model.decoder, self._input_width)
        if model.encoder is not None:
            elements += source * _cell_elements(model.encoder, width)
        if model.attention != "none":
            elements += target * 3 * width + source * width
            elements += target * source * (2 + (width if model.attention == "bahdanau" else 0))
        head_values = target * width * rows + model.padded_vocab_size * width
        return compute * (rows * elements + head_values)

    def _count_weights(self, *beginnings: str) -> int:
        ours = [weight for weight in self.weights() if weight.name.startswith(beginnings)]
        return sum(math.prod(weight.shape) for weight in ours)


def _cell_elements(stack: RecurrentStackConfig, input_width: int) -> int:
    """Returns the values a position that the layers of a stack keep for the backward pass."""
    inputs = input_width + stack.width * (stack.layers - 1)
    states = stack.layers * _KEPT_STATES[stack.cell] * stack.width
    return inputs + states + (2 * stack.width if stack.dropout else 0)


def _cell_weights(name: str, stack: RecurrentStackConfig, input_width: int) -> Weights:
    directions = ("", "_reverse") if stack.bidirectional else ("",)
    hidden = stack.width // len(directions)
    rows = (hidden,) * CELL_GATES[stack.cell]
    group = "recurrent"
    for layer in range(stack.layers):
        for direction in directions:
            # torch has a bias with each of the two matrices.
            for kind, inputs in (("ih", stack.width if layer else input_width), ("hh", hidden)):
                end = f"{kind}_l{layer}{direction}"
                yield NamedWeight(f"{name}.rnn.weight_{end}", (sum(rows), inputs), group, fused=rows)
                yield NamedWeight(f"{name}.rnn.bias_{end}", (sum(rows),), group)
