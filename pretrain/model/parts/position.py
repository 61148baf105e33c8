"""Positions of a stack: vectors added to its input, a rotation of heads, a bias, or none.

placed = stack.position(x_BTD, positions_BT, place)      once a forward
placed.x_BTD                                             input of the first block
placed.rotation, placed.local_rotation, placed.biases    to every attention layer
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pretrain.config.model import PatchesConfig, RotaryScaling, StackConfig
from pretrain.model.backends.backend import DistanceBias
from pretrain.model.parts.rotary import LengthRotaryTable, PatchRotaryTable, RotaryTable, Rotation


class PositionedInput(NamedTuple):
    """Input of a stack, with position vectors added if it has any, and position information.

    `local_rotation` is that of layers with a window, `biases` those of the scores: one of all layers, or
    one of each.
    """

    x_BTD: Tensor
    rotation: Rotation | None = None
    local_rotation: Rotation | None = None
    biases: tuple[DistanceBias | None, ...] = (None,)


class RowPlace(NamedTuple):
    """Place of the columns of rows.

    `offset` is the length of the cache, where tokens without positions begin, `ranks` the number of
    ranks over which the columns are cut, and `capacity` that of the cache.
    """

    offset: int = 0
    ranks: int = 1
    capacity: int | None = None


class NoPosition(nn.Module):
    """No position information besides the attention mask."""

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None, place: RowPlace) -> PositionedInput:
        return PositionedInput(x_BTD)


class LearnedPosition(nn.Module):
    """A table of `max_seq_len` vectors, added to the stack's input (GPT-2, BERT); before them `first`
    rows that no position reads (RoBERTa, BART)."""

    def __init__(self, max_seq_len: int, width: int, first: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(first + max_seq_len, width))
        self._first = first

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None, place: RowPlace) -> PositionedInput:
        if positions_BT is None:
            start = self._first + place.offset
            rows = slice(start, start + x_BTD.shape[1])
            # The gradient of a part is a copy into zeros.
            is_whole = rows == slice(0, len(self.weight))
            return PositionedInput(x_BTD + (self.weight if is_whole else self.weight[rows]))
        rows_BT = positions_BT + self._first if self._first else positions_BT
        return PositionedInput(x_BTD + nn.functional.embedding(rows_BT, self.weight))


def sinusoids(length: int, width: int, layout: str) -> Tensor:
    """Returns the table of Vaswani et al. 2017, 3.5, fp32 [length, D], on the CPU; D is even.

    `interleaved`: dimension 2i is `sin(p / 10000^(2i/D))`, 2i + 1 the cosine (the paper). `halves`:
    all sines, then all cosines (Marian).
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
    positions = torch.arange(length, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, 10000.0**-exponents)
    if layout == "interleaved":
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).float()
    return torch.cat((angles.sin(), angles.cos()), dim=-1).float()


class SinusoidalPosition(nn.Module):
    """Fixed vectors, added to the stack's input; not a buffer (see `RotaryTable`)."""

    def __init__(self, max_seq_len: int, width: int, layout: str) -> None:
        super().__init__()
        self._shape = (max_seq_len, width)
        self._layout = layout
        self._table = torch.empty(0, width)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None, place: RowPlace) -> PositionedInput:
        if not len(self._table):
            self._table = sinusoids(*self._shape, self._layout)
        self._table = self._table.to(x_BTD.device)
        rows = slice(place.offset, place.offset + x_BTD.shape[1]) if positions_BT is None else positions_BT
        return PositionedInput(x_BTD + self._table[rows].to(x_BTD.dtype))


def sinusoids_2d(grid: int, width: int, num_before: int) -> Tensor:
    """Returns the vectors of a square of patches, fp32 [num_before + grid^2, D], on the CPU.

    D is a multiple of 4. The first half of a vector is that of the column (sines, then cosines),
    the second that of the row, as in MAE (He et al. 2022, as released). The vectors before the
    patches are zeros.
    """
    along = sinusoids(grid, width // 2, "halves")
    table = torch.cat((along.repeat(grid, 1), along.repeat_interleave(grid, dim=0)), dim=1)
    return torch.cat((table.new_zeros(num_before, width), table))


class SinusoidalPosition2d(nn.Module):
    """Fixed vectors of row and column, added to the input; not a buffer (see `RotaryTable`)."""

    def __init__(self, patches: PatchesConfig, width: int) -> None:
        super().__init__()
        self._shape = (patches.grid, width, patches.num_before)
        self._table = torch.empty(0, width)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None, place: RowPlace) -> PositionedInput:
        if not len(self._table):
            self._table = sinusoids_2d(*self._shape)
        self._table = self._table.to(x_BTD.device)
        rows = slice(place.offset, place.offset + x_BTD.shape[1]) if positions_BT is None else positions_BT
        return PositionedInput(x_BTD + self._table[rows].to(x_BTD.dtype))


def _build_table(max_seq_len: int, width: int, theta: float, scaling: RotaryScaling | None) -> RotaryTable:
    is_fixed = scaling is None or not scaling.follows_length
    return (RotaryTable if is_fixed else LengthRotaryTable)(max_seq_len, width, theta, scaling)


class RotaryPosition(nn.Module):
    """Rotary angles; layers with a window use `rope_local_theta` if it is set (ModernBERT), and no scaling without
    `rope_local_scaling` (Gemma 3)."""

    def __init__(self, config: StackConfig, max_seq_len: int, patches: PatchesConfig | None = None) -> None:
        super().__init__()
        width, scaling, local = config.rotary_width, config.rope_scaling, config.rope_local_theta
        if config.position == "rotary_2d" and patches is not None:
            self._table: RotaryTable = PatchRotaryTable(patches, width, config.rope_theta)
        else:
            self._table = _build_table(max_seq_len, width, config.rope_theta, scaling)
        self._local_table = self._table
        if local is not None or (scaling is not None and not config.rope_local_scaling):
            scaling = scaling if config.rope_local_scaling else None
            self._local_table = _build_table(max_seq_len, width, local or config.rope_theta, scaling)
        # With matrices over ranks, what gathers their columns: attention then has all of them.
        self.shared: Any = None

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None, place: RowPlace) -> PositionedInput:
        if self.shared is not None and positions_BT is not None:
            positions_BT = self.shared.gather(positions_BT)
        read = (positions_BT, place.offset, x_BTD.shape[1], x_BTD.device, place.capacity)
        rotation = self._table(*read)
        local_rotation = rotation
        if self._local_table is not self._table:
            local_rotation = self._local_table(*read)
        return PositionedInput(x_BTD, rotation, local_rotation)


def distance_buckets(distances: Tensor, *, bidirectional: bool, num_buckets: int, max_distance: int) -> Tensor:
    """Returns the bucket of each distance key minus query, int64 (Raffel et al. 2020, 2.1).

    Half of the buckets of a side cover one distance each, the rest grow logarithmically up to
    `max_distance`. A causal stack has one side: keys after the query share bucket 0 with it.
    """
    first = torch.zeros_like(distances)
    if bidirectional:
        num_buckets //= 2
        first = (distances > 0) * num_buckets
        distances = distances.abs()
    else:
        distances = -distances.clamp(max=0)
    exact = num_buckets // 2
    # fp32, as in released models: bucket boundaries must be identical.
    growth = (distances.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    far = exact + (growth * (num_buckets - exact)).long()
    return first + torch.where(distances < exact, distances, far.clamp(max=num_buckets - 1))


class RelativePosition(nn.Module):
    """A learned bias of the scores by head and bucketed distance, shared by all layers (T5) or not (UMT5).

    The table of a layer that has its own is the next `relative_buckets` rows of `weight`.
    """

    def __init__(self, config: StackConfig, causal: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.relative_tables * config.relative_buckets, config.heads))
        self._num_buckets = config.relative_buckets
        self._bidirectional = not causal
        self._max_distance = config.relative_max_distance

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None, place: RowPlace) -> PositionedInput:
        length = x_BTD.shape[1] * place.ranks
        buckets_R = distance_buckets(
            torch.arange(1 - place.offset - length, length, device=x_BTD.device),
            bidirectional=self._bidirectional,
            num_buckets=self._num_buckets,
            max_distance=self._max_distance,
        )
        # fp32, or fp64 for an exact reference.
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        tables = self.weight.split(self._num_buckets)
        values_LNR = [nn.functional.embedding(buckets_R, table).t().to(exact) for table in tables]
        return PositionedInput(x_BTD, biases=tuple(map(DistanceBias, values_LNR)))


def build_position(
    config: StackConfig, max_seq_len: int, *, causal: bool, first: int = 0, patches: PatchesConfig | None = None
) -> nn.Module:
    """Builds the position module of a stack, called once a forward.

    `first` is the row of the first position in a learned table, and `patches` is `model.input`.

    It gets the stack's input, the positions of its tokens (None: they follow the cache), and the
    place of its rows.
    """
    if config.position == "sinusoidal_2d" and patches is not None:
        return SinusoidalPosition2d(patches, config.width)
    if config.position == "learned":
        return LearnedPosition(max_seq_len, config.table_width, first)
    if config.position == "sinusoidal":
        return SinusoidalPosition(max_seq_len, config.width, config.sinusoid)
    if config.is_rotary:
        return RotaryPosition(config, max_seq_len, patches)
    if config.position == "relative":
        return RelativePosition(config, causal)
    return NoPosition()
