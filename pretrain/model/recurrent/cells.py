"""Torch's recurrent modules, run over rows of documents.

    x_BTD, first states -> torch.nn.RNN, LSTM or GRU -> outputs_BTD, last states

A state is a tuple of tensors [layers, N, D], one for each of N documents: (h,), and for the LSTM (h, c).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pretrain.config.recurrent import RecurrentStackConfig
from pretrain.model.recurrent.segments import Segments

CELLS: dict[str, type[nn.RNNBase]] = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
"""By `cell`."""

State = tuple[Tensor, ...]


def build_cells(config: RecurrentStackConfig, input_width: int) -> nn.RNNBase:
    """Builds the layers of a stack; torch's own dropout is between them."""
    return CELLS[config.cell](
        input_width,
        config.width // (2 if config.bidirectional else 1),
        num_layers=config.layers,
        batch_first=True,
        dropout=config.dropout if config.layers > 1 else 0.0,
        bidirectional=config.bidirectional,
    )


def zero_state(cells: nn.RNNBase, like: Tensor, count: int) -> State:
    """Returns the state before anything is read, for `count` documents, in the dtype and on the device of `like`."""
    directions = 2 if cells.bidirectional else 1
    zeros = like.new_zeros(cells.num_layers * directions, count, cells.hidden_size)
    return (zeros, zeros) if isinstance(cells, nn.LSTM) else (zeros,)


def run_cells(cells: nn.RNNBase, x_BTD: Tensor, segments: Segments, state: State) -> tuple[Tensor, State]:
    """Reads every document from its own first state.

    Costs as many steps as the longest document has tokens, each over the documents that are that long.

    Args:
        cells: From `build_cells`.
        x_BTD: Inputs.
        segments: The documents of the rows, N.
        state: Of each document, before it.

    Returns:
        outputs_BTD, and the state of each document after it.
    """
    if segments.count == len(x_BTD):
        outputs_BTD, last = call_cells(cells, x_BTD, state)
        return outputs_BTD, last
    slots, places = segments.order()
    packed = PackedSequence(x_BTD.flatten(0, 1)[places.data], *places[1:])
    outputs, last = call_cells(cells, packed, state)
    return outputs.data[slots].view(*x_BTD.shape[:2], -1), last


def join_directions(state: State) -> State:
    """Returns the state of a bidirectional stack as one of half as many, twice as wide layers: [2 L, N, D/2] to
    [L, N, D].
    """
    return tuple(torch.cat((held[0::2], held[1::2]), dim=-1) for held in state)


def call_cells(cells: nn.RNNBase, x: Any, state: State) -> tuple[Any, State]:
    """Calls torch's module, whose states are tensors or pairs of them. `x`: [N, T, D], or packed."""
    outputs, last = cells(x, state if isinstance(cells, nn.LSTM) else state[0])
    return outputs, last if isinstance(cells, nn.LSTM) else (last,)
