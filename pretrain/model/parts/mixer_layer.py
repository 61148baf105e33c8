"""Heads of a mixer over ranks, which share its matrices (`parallel.tensor`) or its rows (`parallel.sequence`).

    projections, gates, norms       all heads of a rank's matrices, T / R columns
        | exchange: parts of the heads, from each part of the columns
        v
    convolution, rule               1 / R of these heads, all T columns
        | exchange back
        v
    projections, gates, norms       all heads of a rank's matrices, T / R columns

States and convolutions run along whole rows, and no head reads another. What is of a head and of no
matrix (decays, filters) every rank has whole, and takes its heads of: gradients are summed over ranks.
"""

from typing import Any, ClassVar

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn

from pretrain.model.parts.attention import AttentionContext
from pretrain.parts import Part


def exchange(x: Tensor, group: Any) -> Tensor:
    """Sends part i of dimension 0 to rank i; returns the parts of all ranks, by rank."""
    # Differentiable, and traced by torch.compile, whose graph an autograd.Function would break.
    received = collectives.all_to_all_single_autograd(x.contiguous(), None, None, group)
    return collectives.wait_tensor(received)


class MixerLayer(nn.Module):
    """A layer in the place of attention, some of whose heads a rank has.

    Attributes:
        sizes: Values of the layer, with the heads that this rank's matrices have.
        fused: Rows of each matrix of the parameters that are several, as this rank has them.
        draws: Initial values (`Mixer`).
        shared: Ranks that share its matrices, `TensorRanks`. None: there are none.
        group: Ranks that share its rows. None: there are none.
    """

    draws: ClassVar[dict[str, Any]] = {}

    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.sizes = sizes
        self.fused: dict[str, tuple[int, ...]] = {}
        self.shared: Any = None
        self.group: Any = None

    def cuts(self) -> dict[str, tuple[int, ...] | None]:
        """Returns the matrices that ranks may share, as attention does."""
        return {**self.fused, "output": None}

    def share(self, ranks: Any) -> None:
        """Leaves this rank its part of the heads, of those that share matrices."""
        self.shared = ranks
        self.sizes = self.sizes.of_rank(ranks.size)
        self.fused = {name: tuple(row // ranks.size for row in rows) for name, rows in self.fused.items()}

    def gather(self, x_BtD: Tensor) -> Tensor:
        """Returns the columns of all ranks that share matrices. Collective."""
        return x_BtD if self.shared is None else self.shared.gather(x_BtD)

    def ranks(self, context: AttentionContext) -> int:
        """Returns the number of ranks that exchange heads for columns of this pass; 1: rows are whole."""
        return 1 if self.group is None or context.columns is None else self.group.size()

    def of_matrices(self, weight: Tensor) -> Tensor:
        """Returns what is of the heads of this rank's matrices."""
        return weight if self.shared is None else Part(self.shared.rank, self.shared.size).take(weight)

    def of_heads(self, weight: Tensor, context: AttentionContext, sections: tuple[int, ...] = ()) -> Tensor:
        """Returns what is of the heads that this rank computes, of each section of whole heads."""
        number, ranks = (0, 1) if self.shared is None else (self.shared.rank, self.shared.size)
        more = self.ranks(context)
        if more > 1:
            number = number * more + self.group.rank()
        return Part(number, ranks * more, 0, sections).take(weight)

    def to_heads(self, x_BtC: Tensor, sections: tuple[int, ...]) -> Tensor:
        """Exchanges [B, t, C] of these columns for [B, T, C / R] of all, of each section of heads. Collective."""
        ranks = self.group.size()
        parts = [x.unflatten(-1, (ranks, -1)) for x in x_BtC.split(sections, dim=-1)]
        received_RBtC = exchange(torch.cat(parts, dim=-1).permute(2, 0, 1, 3), self.group)
        return received_RBtC.transpose(0, 1).flatten(1, 2)

    def to_columns(self, x_BTC: Tensor) -> Tensor:
        """Exchanges [B, T, C / R] of one section for [B, t, C]. Collective."""
        received_RBtC = exchange(x_BTC.unflatten(1, (self.group.size(), -1)).transpose(0, 1), self.group)
        return received_RBtC.permute(1, 2, 0, 3).flatten(2)
