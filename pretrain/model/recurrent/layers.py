"""Layers of recurrent models: documents of packed rows, torch's cells over them, attention scores.

    documents_BT -> Segments -> PackedSequence (documents side by side, the longest first) -> rows

A recurrence cannot be masked as attention can: its state contains everything read before. So the
documents of a row are separated, and neither state nor gradient passes from one to the next.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pretrain.config.model import RecurrentStackConfig

PADDING = -1
"""Document number of padding."""


def mark_padding(shape: torch.Size, documents_BT: Tensor | None, lengths_B: Tensor | None) -> Tensor | None:
    """Returns document numbers with PADDING behind each length, [B, T] as `shape`.

    None: every row is one document without padding. Arguments as in `types.Batch`.
    """
    if lengths_B is None:
        return documents_BT
    places_T = torch.arange(shape[1], device=lengths_B.device)
    if documents_BT is None:
        documents_BT = torch.zeros(shape, dtype=torch.int32, device=lengths_B.device)
    return documents_BT.masked_fill(places_T >= lengths_B[:, None], PADDING)


@dataclass(frozen=True, slots=True)
class Segments:
    """The documents of a batch, N in all, in the order of rows and places.

    Attributes:
        begins_BT: bool: first token of a document.
        number_BT: Document of each token, 0 to N-1.
        position_BT: Position of each token in its document.
        row_N: Row of each document.
        document_N: Number of each document in its row.
    """

    begins_BT: Tensor
    number_BT: Tensor
    position_BT: Tensor
    row_N: Tensor
    document_N: Tensor

    @property
    def count(self) -> int:
        """N."""
        return len(self.row_N)

    def pack(self) -> tuple[Tensor, PackedSequence]:
        """Returns the slot of each token in a packed sequence, and that sequence of tokens' places.

        Reads the lengths on the host.
        """
        numbers = self.number_BT.flatten()
        positions = self.position_BT.flatten()
        lengths_N = torch.bincount(numbers, minlength=self.count)
        longest_first_N = lengths_N.argsort(descending=True, stable=True)
        rank_N = torch.empty_like(longest_first_N)
        rank_N[longest_first_N] = torch.arange(self.count, device=rank_N.device)
        places = (positions * self.count + rank_N[numbers]).argsort()
        slots = torch.empty_like(places)
        slots[places] = torch.arange(len(places), device=places.device)
        sizes = torch.bincount(positions).cpu()
        return slots, PackedSequence(places, sizes, longest_first_N, rank_N)


def split_rows(shape: torch.Size, documents_BT: Tensor | None, device: torch.device) -> Segments:
    """Finds the documents of rows, runs of equal numbers; None: every row is one document."""
    columns_T = torch.arange(shape[1], device=device)
    begins_BT = (columns_T == 0).expand(shape).clone()
    if documents_BT is not None:
        begins_BT[:, 1:] |= documents_BT[:, 1:] != documents_BT[:, :-1]
    row_N, column_N = begins_BT.nonzero(as_tuple=True)
    first_BT = (columns_T * begins_BT).cummax(dim=1).values
    document_N = torch.zeros_like(row_N)
    if documents_BT is not None:
        document_N = documents_BT[row_N, column_N].long()
    return Segments(
        begins_BT=begins_BT,
        number_BT=begins_BT.flatten().cumsum(0).view(shape) - 1,
        position_BT=columns_T - first_BT,
        row_N=row_N,
        document_N=document_N,
    )


CELLS: dict[str, type[nn.RNNBase]] = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}

State = tuple[Tensor, ...]
"""One tensor [layers, N, D] of N documents; hidden and cell state for the LSTM."""


def build_cells(config: RecurrentStackConfig, input_width: int) -> nn.RNNBase:
    """Builds the layers of a stack, with torch's own dropout between them."""
    return CELLS[config.cell](
        input_width,
        config.width // (2 if config.bidirectional else 1),
        num_layers=config.layers,
        batch_first=True,
        dropout=config.dropout if config.layers > 1 else 0.0,
        bidirectional=config.bidirectional,
    )


def zero_state(cells: nn.RNNBase, like: Tensor, count: int) -> State:
    """Returns the initial state of `count` documents, in the dtype and on the device of `like`."""
    directions = 2 if cells.bidirectional else 1
    zeros = like.new_zeros(cells.num_layers * directions, count, cells.hidden_size)
    return (zeros, zeros) if isinstance(cells, nn.LSTM) else (zeros,)


def call_cells(cells: nn.RNNBase, x: Any, state: State) -> tuple[Any, State]:
    """Calls torch's module, whose states are tensors or pairs; x is [N, T, D], or packed."""
    outputs, last = cells(x, state if isinstance(cells, nn.LSTM) else state[0])
    return outputs, last if isinstance(cells, nn.LSTM) else (last,)


def run_cells(cells: nn.RNNBase, x_BTD: Tensor, segments: Segments, state: State) -> tuple[Tensor, State]:
    """Reads every document from its own initial state; returns outputs_BTD and the final states.

    Takes as many steps as the longest document has tokens, each over the documents of that length.
    """
    if segments.count == len(x_BTD):
        return call_cells(cells, x_BTD, state)
    slots, places = segments.pack()
    packed = PackedSequence(x_BTD.flatten(0, 1)[places.data], *places[1:])
    outputs, last = call_cells(cells, packed, state)
    return outputs.data[slots].view(*x_BTD.shape[:2], -1), last


class AdditiveScore(nn.Module):
    """`v . tanh(W s + U h)` (Bahdanau et al. 2015, appendix A.1.2)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.energy = nn.Linear(width, 1, bias=False)

    def forward(self, states_BTD: Tensor, keys_BSD: Tensor) -> Tensor:
        """Returns scores_BTS; `keys_BSD` is `key` of the encoder's output."""
        hidden_BTSD = (self.query(states_BTD)[:, :, None] + keys_BSD[:, None]).tanh()
        return self.energy(hidden_BTSD)[..., 0]


class MultiplicativeScore(nn.Module):
    """`s . W h` (general) or `s . h` (dot) (Luong et al. 2015, 3.1)."""

    def __init__(self, width: int, *, general: bool) -> None:
        super().__init__()
        self.key = nn.Linear(width, width, bias=False) if general else nn.Identity()

    def forward(self, states_BTD: Tensor, keys_BSD: Tensor) -> Tensor:
        """Returns scores_BTS; arguments as in `AdditiveScore`."""
        return states_BTD @ keys_BSD.transpose(1, 2)
