"""Documents of packed rows, as sequences that a recurrence reads each from its own first state.

    documents_BT -> Segments -> PackedSequence (torch runs documents side by side, the longest first) -> back to rows

A recurrence cannot be masked as attention can: what it has read is in its state. So documents that share a row are
taken apart, and neither state nor gradient passes from one to the next. Not here: cells.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pretrain.config.recurrent import RecurrentConfig, RecurrentStackConfig

PADDING = -1

"""Document number of what lies behind a row's length."""


def real_documents(shape: torch.Size, documents_BT: Tensor | None, lengths_B: Tensor | None) -> Tensor | None:
    """Returns the document of each token, padding apart; None: every row is one document, without padding.

    Args:
        shape: B, T.
        documents_BT: Document numbers as in `types.Batch`.
        lengths_B: Row lengths as in `types.Batch`.
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
        begins_BT: bool: a token begins a document.
        number_BT: int64, 0 to N-1: which document a token is of.
        position_BT: int64: place of a token in its document.
        row_N: int64: row that a document is in.
        document_N: Document number in its row.
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

    def order(self) -> tuple[Tensor, PackedSequence]:
        """Returns where each token of the rows comes in a packed sequence, and that sequence, of places in the rows.

        Reads the lengths on the host.
        """
        numbers, positions = self.number_BT.flatten(), self.position_BT.flatten()
        longest_first_N = torch.bincount(numbers, minlength=self.count).argsort(descending=True, stable=True)
        rank_N = torch.empty_like(longest_first_N)
        rank_N[longest_first_N] = torch.arange(self.count, device=rank_N.device)
        places = (positions * self.count + rank_N[numbers]).argsort()
        slots = torch.empty_like(places)
        slots[places] = torch.arange(len(places), device=places.device)
        return slots, PackedSequence(places, torch.bincount(positions).cpu(), longest_first_N, rank_N)


def split_rows(shape: torch.Size, documents_BT: Tensor | None, device: torch.device) -> Segments:
    """Finds the documents of rows: a document is a run of equal numbers. None: every row is one."""
    columns_T = torch.arange(shape[1], device=device)
    begins_BT = (columns_T == 0).expand(shape).clone()
    if documents_BT is not None:
        begins_BT[:, 1:] |= documents_BT[:, 1:] != documents_BT[:, :-1]
    row_N, column_N = begins_BT.nonzero(as_tuple=True)
    first_BT = (columns_T * begins_BT).cummax(dim=1).values
    return Segments(
        begins_BT=begins_BT,
        number_BT=begins_BT.flatten().cumsum(0).view(shape) - 1,
        position_BT=columns_T - first_BT,
        row_N=row_N,
        document_N=torch.zeros_like(row_N) if documents_BT is None else documents_BT[row_N, column_N].long(),
    )


def match(targets: Segments, sources: Segments) -> tuple[Tensor, Tensor]:
    """Returns for each document of the targets which of the sources belongs to it, and whether there is one. N x N."""
    same = targets.row_N[:, None] == sources.row_N
    same &= targets.document_N[:, None] == sources.document_N
    return same.int().argmax(dim=1), same.any(dim=1)


# Torch's recurrent modules, run over rows of documents.
#
#     x_BTD, first states -> torch.nn.RNN, LSTM or GRU -> outputs_BTD, last states
#
# A state is a tuple of tensors [layers, N, D], one for each of N documents: (h,), and for the LSTM
# (h, c).


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
        state: State of each document before it.

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


# Attention of a recurrent decoder to what its encoder read.
#
#     scores_BTS of states and encoder outputs  ->  softmax over the source's own document  ->  context_BTD
#
# Two ways of scoring: Bahdanau et al. (2015, appendix A.1.2), `v . tanh(W s + U h)`, and Luong et
# al. (2015, 3.1), `s . W h` (general) or `s . h` (dot).


class AdditiveScore(nn.Module):
    """`v . tanh(W s + U h)`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.energy = nn.Linear(width, 1, bias=False)

    def keys(self, memory_BSD: Tensor) -> Tensor:
        """Returns what of the scores depends on the source alone: computed once, not at each step."""
        return self.key(memory_BSD)

    def forward(self, states_BTD: Tensor, keys_BSD: Tensor) -> Tensor:
        hidden_BTSD = (self.query(states_BTD)[:, :, None] + keys_BSD[:, None]).tanh()
        return self.energy(hidden_BTSD)[..., 0]


class MultiplicativeScore(nn.Module):
    """`s . W h`, or `s . h`."""

    def __init__(self, width: int, *, general: bool) -> None:
        super().__init__()
        self.key = nn.Linear(width, width, bias=False) if general else nn.Identity()

    def keys(self, memory_BSD: Tensor) -> Tensor:
        """As `AdditiveScore.keys`."""
        return self.key(memory_BSD)

    def forward(self, states_BTD: Tensor, keys_BSD: Tensor) -> Tensor:
        return states_BTD @ keys_BSD.transpose(1, 2)


Score = AdditiveScore | MultiplicativeScore


def build_score(config: RecurrentConfig) -> Score | None:
    """Returns what `attention` names; None where there is none."""
    if config.attention == "none":
        return None
    width = config.decoder.width
    if config.attention == "bahdanau":
        return AdditiveScore(width)
    return MultiplicativeScore(width, general=config.score == "general")


def mix(scores_BTS: Tensor, memory_BSD: Tensor, visible_BTS: Tensor | None) -> Tensor:
    """Returns context_BTD: the mean of the encoder's outputs, weighted by the softmax of the scores.

    Args:
        scores_BTS: Scores of each target and source token.
        memory_BSD: Outputs of the encoder.
        visible_BTS: bool; None: all. A target token without a source gets zeros.
    """
    if visible_BTS is None:
        return scores_BTS.softmax(dim=-1) @ memory_BSD
    lowest = torch.finfo(scores_BTS.dtype).min
    weights_BTS = scores_BTS.masked_fill(~visible_BTS, lowest).softmax(dim=-1)
    # A row that sees nothing has equal weights now: none of them may count.
    return weights_BTS.masked_fill(~visible_BTS, 0.0) @ memory_BSD
