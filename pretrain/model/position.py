"""How order enters a stack: vectors added to its input, a rotation of queries and keys, a bias by distance, or nothing.

placed = stack.position(x_BTD, positions_BT, offset)          once a forward
placed.x_BTD -> first block; placed.rotation, placed.local_rotation, placed.bias -> every attention layer
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pretrain.config.model import StackConfig
from pretrain.model.backends.backend import DistanceBias
from pretrain.model.rotary import RotaryTable, Rotation


class Placed(NamedTuple):
    """The input of a stack with its order.

    Attributes:
        x_BTD: Input, position vectors added where there are any.
        rotation: Rotary angles; None: there are none.
        local_rotation: Those of layers that have a window.
        bias: Bias of the scores in every layer.
    """

    x_BTD: Tensor
    rotation: Rotation | None = None
    local_rotation: Rotation | None = None
    bias: DistanceBias | None = None


class NoPosition(nn.Module):
    """Order does not enter: attention alone, with its mask, tells positions apart."""

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None, offset: int) -> Placed:
        return Placed(x_BTD)


class LearnedPosition(nn.Module):
    """A table of `max_seq_len` vectors, added to the stack's input (GPT-2, BERT)."""

    def __init__(self, max_seq_len: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_seq_len, width))

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None, offset: int) -> Placed:
        if positions_BT is None:
            return Placed(x_BTD + self.weight[offset : offset + x_BTD.shape[1]])
        return Placed(x_BTD + nn.functional.embedding(positions_BT, self.weight))


def sinusoids(length: int, width: int, layout: str) -> Tensor:
    """Returns the table of Vaswani et al. 2017, 3.5, fp32 [length, D], on the CPU.

    Args:
        length: Positions, from 0.
        width: D, even.
        layout: `interleaved`: dimension 2i is `sin(p / 10000^(2i/D))`, 2i + 1 the cosine (the paper). `halves`: all
            sines, then all cosines (Marian).
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
    positions = torch.arange(length, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, 10000.0**-exponents)
    if layout == "interleaved":
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).float()
    return torch.cat((angles.sin(), angles.cos()), dim=-1).float()


class SinusoidalPosition(nn.Module):
    """Fixed vectors, added to the stack's input; made when first needed, and not a buffer (see `RotaryTable`)."""

    def __init__(self, max_seq_len: int, width: int, layout: str) -> None:
        super().__init__()
        self._shape, self._layout = (max_seq_len, width), layout
        self._table = torch.empty(0, width)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None, offset: int) -> Placed:
        if not len(self._table):
            self._table = sinusoids(*self._shape, self._layout)
        self._table = self._table.to(x_BTD.device)
        rows = slice(offset, offset + x_BTD.shape[1]) if positions_BT is None else positions_BT
        return Placed(x_BTD + self._table[rows].to(x_BTD.dtype))


class RotaryPosition(nn.Module):
    """Rotary angles; layers that have a window have a period of their own where the config gives one (ModernBERT)."""

    def __init__(self, config: StackConfig, max_seq_len: int) -> None:
        super().__init__()
        width, scaling = config.per_head_width, config.rope_scaling
        self._table = RotaryTable(max_seq_len, width, config.rope_theta, scaling)
        local = config.rope_local_theta
        self._local_table = self._table if local is None else RotaryTable(max_seq_len, width, local, scaling)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None, offset: int) -> Placed:
        length, device = x_BTD.shape[1], x_BTD.device
        rotation = self._table(positions_BT, offset, length, device)
        if self._local_table is self._table:
            return Placed(x_BTD, rotation, rotation)
        return Placed(x_BTD, rotation, self._local_table(positions_BT, offset, length, device))


def distance_buckets(distances: Tensor, *, bidirectional: bool, num_buckets: int, max_distance: int) -> Tensor:
    """Returns the bucket of each distance key minus query, int64 (Raffel et al. 2020, 2.1).

    Half of the buckets of a side hold one distance each, the rest grow logarithmically up to `max_distance`. A causal
    stack has one side: keys after the query share bucket 0 with the query itself.
    """
    first = torch.zeros_like(distances)
    if bidirectional:
        num_buckets //= 2
        first = (distances > 0) * num_buckets
        distances = distances.abs()
    else:
        distances = -distances.clamp(max=0)
    exact = num_buckets // 2
    # In fp32, like the models that were trained with it: a boundary must fall where theirs does.
    growth = (distances.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    far = exact + (growth * (num_buckets - exact)).long()
    return first + torch.where(distances < exact, distances, far.clamp(max=num_buckets - 1))


class RelativePosition(nn.Module):
    """A learned bias of the scores by head and bucketed distance (T5), shared by all layers and made once a forward."""

    def __init__(self, config: StackConfig, causal: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.relative_buckets, config.heads))
        self._bidirectional, self._max_distance = not causal, config.relative_max_distance

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None, offset: int) -> Placed:
        keys = offset + x_BTD.shape[1]
        distances = torch.arange(1 - keys, x_BTD.shape[1], device=x_BTD.device)
        return Placed(x_BTD, bias=DistanceBias(self._values(distances)))

    def _values(self, distances_R: Tensor) -> Tensor:
        buckets_R = distance_buckets(
            distances_R,
            bidirectional=self._bidirectional,
            num_buckets=self.weight.shape[0],
            max_distance=self._max_distance,
        )
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        return nn.functional.embedding(buckets_R, self.weight).t().to(exact)


def build_position(config: StackConfig, max_seq_len: int, *, causal: bool) -> nn.Module:
    """Builds the position module of a stack; called as `(x_BTD, positions_BT | None, offset) -> Placed`."""
    if config.position == "learned":
        return LearnedPosition(max_seq_len, config.width)
    if config.position == "sinusoidal":
        return SinusoidalPosition(max_seq_len, config.width, config.sinusoid)
    if config.position == "rotary":
        return RotaryPosition(config, max_seq_len)
    if config.position == "relative":
        return RelativePosition(config, causal)
    return NoPosition()
