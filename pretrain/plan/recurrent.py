"""The matrices of a recurrent model, which its parameters and its FLOPs are counted from."""

from collections.abc import Iterator

from pretrain.config.recurrent import RecurrentConfig, RecurrentStackConfig

_GATES = {"rnn": 1, "gru": 3, "lstm": 4}


def decoder_input_width(model: RecurrentConfig) -> int:
    """Returns what the first layer of the decoder reads: a token, and what attention gave where that is fed back."""
    return model.decoder.width * (2 if model.feeds_back else 1)


def cell_matrices(stack: RecurrentStackConfig, input_width: int) -> Iterator[tuple[int, int]]:
    """Yields inputs and outputs of each matrix of each layer and direction; beside each, torch has a bias."""
    directions = 2 if stack.bidirectional else 1
    hidden = stack.width // directions
    for layer in range(stack.layers):
        for _ in range(directions):
            yield input_width if layer == 0 else stack.width, _GATES[stack.cell] * hidden
            yield hidden, _GATES[stack.cell] * hidden


def attention_weights(model: RecurrentConfig) -> tuple[int, int, int]:
    """Returns the weights of attention that meet a target token, a source token, and a pair of them."""
    square = model.decoder.width**2
    if model.attention == "bahdanau":
        return 3 * square, square, model.decoder.width
    if model.attention == "luong":
        return 2 * square, square if model.score == "general" else 0, 0
    return 0, 0, 0
