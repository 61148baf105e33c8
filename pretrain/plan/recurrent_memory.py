"""What torch's recurrent cells keep for their backward pass, roughly: as on a CPU; what cuDNN reserves is its own."""

from pretrain.config.engine import EngineConfig
from pretrain.config.lengths import RowLengths
from pretrain.config.recurrent import RecurrentConfig, RecurrentStackConfig

_KEPT_STATES = {"rnn": 1, "gru": 7, "lstm": 16}
"""Vectors of the width of the state that a step keeps: its gates before and after, its state, and products of both."""


def _stack_elements(stack: RecurrentStackConfig, input_width: int) -> int:
    """Returns elements that a token leaves in all layers."""
    inputs = input_width + stack.width * (stack.layers - 1)
    return inputs + stack.layers * _KEPT_STATES[stack.cell] * stack.width + (2 * stack.width if stack.dropout else 0)


def recurrent_bytes(model: RecurrentConfig, engine: EngineConfig, lengths: RowLengths, micro: int) -> int:
    """Returns the bytes that a micro-batch keeps, to within about a third.

    With attention the pairs of target and source count: additive attention keeps a vector of width D for each of them.

    Args:
        model: Its vocabulary known.
        engine: Its precision.
        lengths: T and S.
        micro: Rows that a rank runs at once.
    """
    size, width = (4 if engine.precision == "fp32" else 2), model.decoder.width
    elements = lengths.target * _stack_elements(model.decoder, width * (2 if model.feeds_back else 1))
    source = lengths.source or lengths.target
    if model.encoder is not None:
        elements += source * _stack_elements(model.encoder, width)
    if model.attention != "none":
        elements += lengths.target * 3 * width + source * width
        elements += lengths.target * source * (2 + (width if model.attention == "bahdanau" else 0))
    head = lengths.target * width * micro + model.padded_vocab_size * width
    return size * (micro * elements + head)
