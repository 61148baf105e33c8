"""Documents of packed rows, as sequences that a recurrence reads each from its own first state.

    documents_BT -> Segments -> PackedSequence (torch runs documents side by side, the longest first) -> back to rows

A recurrence cannot be masked as attention can: what it has read is in its state. So documents that share a row are
taken apart, and neither state nor gradient passes from one to the next. Not here: cells.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

PADDING = -1
"""Document number of what lies behind a row's length."""


def real_documents(shape: torch.Size, documents_BT: Tensor | None, lengths_B: Tensor | None) -> Tensor | None:
    """Returns the document of each token, padding apart; None: every row is one document, without padding.

    Args:
        shape: B, T.
        documents_BT: As `types.Batch`.
        lengths_B: Likewise.
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
        document_N: Its number in that row.
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
