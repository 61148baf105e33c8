"""Positions of a stack: vectors added to its input, a rotation of heads, a bias, or none.

    placed = stack.position(x_BTD, positions_BT, offset)     once a forward
    placed.x_BTD                                             input of the first block
    placed.rotation, placed.local_rotation, placed.biases    to every attention layer

Rotary embedding (Su et al. 2021) rotates queries and keys by angles proportional to their position;
of patches, by those of column and row.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pretrain.config.model import PatchesConfig, RotaryScaling, StackConfig
from pretrain.model.backends.backend import DistanceBias


class Rotation(NamedTuple):
    """Cosines and sines of the rotary angles, fp32, [T or B T, 1, R]: R repeats its first half.

    R is the rotated width of a head, its first dimensions: H without `rope_fraction`. The sines of
    the first half are negated: a rotation is `x * cos + swap_halves(x) * sin`. Both have the
    magnitude of the scaling.
    """

    cos: Tensor
    sin: Tensor


def rotary_frequencies(rotary_width: int, theta: float, scaling: RotaryScaling | None) -> Tensor:
    """Returns the angle of a step of each rotated pair, [R / 2], fp64 for large angles."""
    exponents = torch.arange(0, rotary_width, 2, dtype=torch.float64, device="cpu") / rotary_width
    frequencies = theta**-exponents
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        kept = _kept_by_yarn(rotary_width, theta, scaling)
        return frequencies * (kept + (1 - kept) / scaling.factor)
    # LLaMA 3: full turns of a dimension within the original length. Its frequency is kept (1) at
    # high_freq_factor turns or more, divided by `factor` (0) at low_freq_factor or fewer, and
    # interpolated between.
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _kept_by_yarn(rotary_width: int, theta: float, scaling: RotaryScaling) -> Tensor:
    """Returns the share of each frequency that is kept, [R / 2] (Peng et al. 2023, 3.2)."""
    # The pair of dimensions, a real number, that turns so often in the original length.
    turns = (scaling.beta_fast, scaling.beta_slow)
    ratios = (scaling.original_max_seq_len / (2 * math.pi * number) for number in turns)
    fast, slow = (rotary_width * math.log(ratio) / (2 * math.log(theta)) for ratio in ratios)
    if scaling.truncate:
        fast, slow = math.floor(fast), math.ceil(slow)
    # As in transformers: the bound is R - 1, though there are R / 2 pairs, and no range is empty.
    first, last = max(fast, 0), min(slow, rotary_width - 1)
    width = last - first or 0.001
    pairs = torch.arange(rotary_width // 2, dtype=torch.float64, device="cpu")
    return 1 - ((pairs - first) / width).clamp(0, 1)


def rotary_magnitude(scaling: RotaryScaling | None) -> float:
    """Returns the factor of rotated queries and keys."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    return scaling.attention_factor or 0.1 * math.log(max(1.0, scaling.factor)) + 1.0


class RotaryTable:
    """Cosines and sines by position; dimension i is paired with i + R/2, as in Hugging Face."""

    # Built at the first use, and again for a longer row: a model on the meta device costs nothing.
    # Plain attributes, not buffers: an engine that casts a module to bf16 would round them.

    def __init__(self, max_seq_len: int, rotary_width: int, theta: float, scaling: RotaryScaling | None) -> None:
        self._max_seq_len = max_seq_len
        self._frequencies = rotary_frequencies(rotary_width, theta, scaling)
        self._magnitude = rotary_magnitude(scaling)
        self._cos = self._sin = torch.empty(0, rotary_width)

    def __call__(self, positions_BT: Tensor | None, offset: int, length: int, device: torch.device) -> Rotation:
        """Returns the rotation of the given positions, or of `length` from `offset` on."""
        end = offset + length if positions_BT is None else self._max_seq_len
        if self._cos.shape[0] < end:
            angles = self._angles(min(self._max_seq_len, 1 << (end - 1).bit_length()))
            cos, sin = angles.cos() * self._magnitude, angles.sin() * self._magnitude
            self._cos = torch.cat((cos, cos), dim=-1).float()
            self._sin = torch.cat((-sin, sin), dim=-1).float()
        if self._cos.device != device:
            self._cos = self._cos.to(device)
            self._sin = self._sin.to(device)
        rows = slice(offset, offset + length) if positions_BT is None else positions_BT
        return Rotation(self._cos[rows].unsqueeze(-2), self._sin[rows].unsqueeze(-2))

    def _angles(self, length: int) -> Tensor:
        """Returns the angle of each pair at each position, fp64 [length, R / 2]."""
        return torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), self._frequencies)


class PatchRotaryTable(RotaryTable):
    """The rotation of a square of patches by axis: the first half of the pairs turns by the column,
    the second by the row, at the same frequencies; what comes before the patches is not turned."""

    def __init__(self, patches: PatchesConfig, rotary_width: int, theta: float) -> None:
        super().__init__(patches.positions, rotary_width, theta, None)
        self._grid, self._before = patches.grid, patches.num_before
        self._frequencies = rotary_frequencies(rotary_width // 2, theta, None)

    def _angles(self, length: int) -> Tensor:
        along = super()._angles(self._grid)
        places = (along.repeat(self._grid, 1), along.repeat_interleave(self._grid, dim=0))
        angles = torch.cat(places, dim=1)
        return torch.cat((angles.new_zeros(self._before, angles.shape[1]), angles))[:length]


class _Rotate(torch.autograd.Function):
    """`x * cos + swap_halves(x) * sin` in three kernels each way, not the ten of autograd."""

    @staticmethod
    def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = cos.shape[-1]
        half = width // 2
        if width == x.shape[-1]:
            swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
            return swapped.mul_(sin).addcmul_(x, cos)
        turned = torch.cat((x[..., half:width], x[..., :half], x[..., width:]), dim=-1)
        turned[..., :width].mul_(sin).addcmul_(x[..., :width], cos)
        return turned

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _Rotate._turn(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotate._turn(grad, cos, -sin), None, None


def rotate(x_BTNH: Tensor, rotation: Rotation) -> Tensor:
    """Rotates the first R dimensions of each head vector by the angles of its position; keeps dtype and shape.

    The score of a rotated query and key depends on the difference of their positions only.
    """
    return _Rotate.apply(x_BTNH, *rotation)


class PositionedInput(NamedTuple):
    """Input of a stack, with position vectors added if it has any, and position information.

    `local_rotation` is that of layers with a window, `biases` those of the scores: one of all layers, or
    one of each.
    """

    x_BTD: Tensor
    rotation: Rotation | None = None
    local_rotation: Rotation | None = None
    biases: tuple[DistanceBias | None, ...] = (None,)


class NoPosition(nn.Module):
    """No position information besides the attention mask."""

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None, offset: int, ranks: int = 1) -> PositionedInput:
        return PositionedInput(x_BTD)


class LearnedPosition(nn.Module):
    """A table of `max_seq_len` vectors, added to the stack's input (GPT-2, BERT); before them `first`
    rows that no position reads (RoBERTa, BART)."""

    def __init__(self, max_seq_len: int, width: int, first: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(first + max_seq_len, width))
        self._first = first

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None, offset: int, ranks: int = 1) -> PositionedInput:
        if positions_BT is None:
            start = self._first + offset
            return PositionedInput(x_BTD + self.weight[start : start + x_BTD.shape[1]])
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

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None, offset: int, ranks: int = 1) -> PositionedInput:
        if not len(self._table):
            self._table = sinusoids(*self._shape, self._layout)
        self._table = self._table.to(x_BTD.device)
        rows = slice(offset, offset + x_BTD.shape[1]) if positions_BT is None else positions_BT
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

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None, offset: int, ranks: int = 1) -> PositionedInput:
        if not len(self._table):
            self._table = sinusoids_2d(*self._shape)
        self._table = self._table.to(x_BTD.device)
        rows = slice(offset, offset + x_BTD.shape[1]) if positions_BT is None else positions_BT
        return PositionedInput(x_BTD + self._table[rows].to(x_BTD.dtype))


class RotaryPosition(nn.Module):
    """Rotary angles; layers with a window use `rope_local_theta` if it is set (ModernBERT)."""

    def __init__(self, config: StackConfig, max_seq_len: int, patches: PatchesConfig | None = None) -> None:
        super().__init__()
        width, scaling, local = config.rotary_width, config.rope_scaling, config.rope_local_theta
        if config.position == "rotary_2d" and patches is not None:
            self._table: RotaryTable = PatchRotaryTable(patches, width, config.rope_theta)
        else:
            self._table = RotaryTable(max_seq_len, width, config.rope_theta, scaling)
        self._local_table = self._table
        if local is not None:
            self._local_table = RotaryTable(max_seq_len, width, local, scaling)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None, offset: int, ranks: int = 1) -> PositionedInput:
        place = (positions_BT, offset, x_BTD.shape[1], x_BTD.device)
        rotation = self._table(*place)
        local_rotation = rotation
        if self._local_table is not self._table:
            local_rotation = self._local_table(*place)
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

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None, offset: int, ranks: int = 1) -> PositionedInput:
        length = x_BTD.shape[1] * ranks
        buckets_R = distance_buckets(
            torch.arange(1 - offset - length, length, device=x_BTD.device),
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

    It gets the stack's input, the positions of its tokens (None: they follow `offset`, the length
    of the cache), and the number of ranks over which the columns of rows are cut.
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
