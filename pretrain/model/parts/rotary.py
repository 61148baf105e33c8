"""Rotary embedding (Su et al. 2021): queries and keys turned by angles proportional to their position.

Of patches, by angles of column and row. Scalings change the frequencies for sequences that are
longer than those of the original training.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretrain.config.model import PatchesConfig, RotaryScaling


class Rotation(NamedTuple):
    """Cosines and sines of the rotary angles, fp32, [T or B T, 1, R]: R repeats its first half.

    R is the rotated width of a head, its first dimensions: H without `rope_fraction`. The sines of
    the first half are negated: a rotation is `x * cos + swap_halves(x) * sin`. Both have the
    magnitude of the scaling.
    """

    cos: Tensor
    sin: Tensor


def rotary_frequencies(rotary_width: int, theta: float, scaling: RotaryScaling | None) -> Tensor:
    """Returns the angle of a step of each rotated pair, [R / 2], fp64 for large angles.

    Without a scaling that follows the length of a document.
    """
    exponents = torch.arange(0, rotary_width, 2, dtype=torch.float64, device="cpu") / rotary_width
    frequencies = theta**-exponents
    if scaling is None or scaling.follows_length:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        share = _kept_by_yarn(rotary_width, theta, scaling)
        return frequencies * (share + (1 - share) / scaling.factor)
    # LLaMA 3: full turns of a dimension within the original length. Its frequency is kept (1) at
    # high_freq_factor turns or more, divided by `factor` (0) at low_freq_factor or fewer, and
    # interpolated between.
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0, 1)
    return frequencies * (share + (1 - share) / scaling.factor)


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
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    growth = math.log(max(1.0, scaling.factor))
    if scaling.kind == "yarn":
        return 0.1 * growth + 1.0
    return math.sqrt(1.0 + growth / math.log(scaling.original_max_seq_len)) if growth else 1.0


class RotaryTable:
    """Cosines and sines by position; dimension i is paired with i + R/2, as in Hugging Face."""

    # Built at the first use, and again for a longer row: a model on the meta device costs nothing.
    # Plain attributes, not buffers: an engine that casts a module to bf16 would round them.

    def __init__(self, max_seq_len: int, rotary_width: int, theta: float, scaling: RotaryScaling | None) -> None:
        self._max_seq_len = max_seq_len
        self._frequencies = rotary_frequencies(rotary_width, theta, scaling)
        self._magnitude = rotary_magnitude(scaling)
        self._cos = self._sin = torch.empty(0, 1, rotary_width)

    def __call__(
        self,
        positions_BT: Tensor | None,
        offset: int,
        length: int,
        device: torch.device,
        capacity: int | None = None,
    ) -> Rotation:
        """Returns the rotation of the given positions, or of `length` from `offset` on."""
        end = offset + length if positions_BT is None else self._max_seq_len
        if self._cos.shape[0] < end:
            angles = self._angles(min(self._max_seq_len, 1 << (end - 1).bit_length()))
            cos, sin = angles.cos() * self._magnitude, angles.sin() * self._magnitude
            self._cos = torch.cat((cos, cos), dim=-1).float().unsqueeze(-2)
            self._sin = torch.cat((-sin, sin), dim=-1).float().unsqueeze(-2)
        if self._cos.device != device:
            self._cos = self._cos.to(device)
            self._sin = self._sin.to(device)
        rows = slice(offset, offset + length) if positions_BT is None else positions_BT
        return Rotation(self._cos[rows], self._sin[rows])

    def _angles(self, length: int) -> Tensor:
        return torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), self._frequencies)


class LengthRotaryTable(RotaryTable):
    """The rotation under a scaling that follows the length L of a document.

    `dynamic`   period theta ((f L / L0) - (f - 1))^(R / (R - 2)) where L > L0     (NTK by length)
    `longrope`  frequencies divided by the long factors where L > L0, else by the short ones

    L is that of the whole row, or of each document of a packed one, so that a document has the same
    angles alone. In decoding it is the length so far for `dynamic`, whose cached keys stay as they
    are, and for `longrope` the capacity of the cache.
    """

    # Computed at each call, without a table: there is one for each length, and none is read twice.

    def __init__(self, max_seq_len: int, rotary_width: int, theta: float, scaling: RotaryScaling | None) -> None:
        super().__init__(max_seq_len, rotary_width, theta, scaling)
        assert scaling is not None
        self._scaling, self._width = scaling, rotary_width

    def __call__(
        self,
        positions_BT: Tensor | None,
        offset: int,
        length: int,
        device: torch.device,
        capacity: int | None = None,
    ) -> Rotation:
        """Returns the rotation of the given positions, or of `length` from `offset` on."""
        if positions_BT is None:
            positions_BT = torch.arange(offset, offset + length, device=device)
            ends_BT = positions_BT.new_full((1,), offset + length)
        else:
            ends_BT = document_lengths(positions_BT)
        if capacity is not None and self._scaling.kind == "longrope":
            ends_BT = torch.full_like(ends_BT, capacity)
        frequencies = self._frequencies_of(ends_BT[..., None].double())
        angles = positions_BT[..., None].double() * frequencies
        cos, sin = angles.cos() * self._magnitude, angles.sin() * self._magnitude
        cos, sin = torch.cat((cos, cos), dim=-1).float(), torch.cat((-sin, sin), dim=-1).float()
        return Rotation(cos.unsqueeze(-2), sin.unsqueeze(-2))

    def _frequencies_of(self, ends: Tensor) -> Tensor:
        """Returns the frequencies in documents of these lengths, fp64 [..., 1] to [..., R / 2]."""
        scaling, own = self._scaling, self._frequencies.to(ends.device)
        original = scaling.original_max_seq_len
        if scaling.kind == "longrope":
            short = own / own.new_tensor(scaling.short_factors)
            return torch.where(ends > original, own / own.new_tensor(scaling.long_factors), short)
        growth = (scaling.factor * ends.clamp(min=original) / original) - (scaling.factor - 1.0)
        # theta^(-2 i / R) by another theta: the growth to the power of 2 i / (R - 2).
        exponents = torch.arange(0, self._width, 2, dtype=torch.float64, device=ends.device)
        return own * growth ** (-exponents / (self._width - 2))


def document_lengths(positions_BT: Tensor) -> Tensor:
    """Returns the length of each token's document, [B, T], of positions that count from its start."""
    columns_T = torch.arange(positions_BT.shape[-1], device=positions_BT.device)
    # In decoding a document began before the row.
    starts_BT = (columns_T - positions_BT).clamp(min=0)
    ends_BT = torch.zeros_like(positions_BT).scatter_reduce(-1, starts_BT, positions_BT + 1, "amax")
    return ends_BT.gather(-1, starts_BT)


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
            first, second = x.chunk(2, dim=-1)
            return torch.cat((second, first), dim=-1).mul_(sin).addcmul_(x, cos)
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
    # Compiled as plain operations, which fuse as well: torch 2.11 finds no gradient of a function's
    # input where its forward changes in place what it returns (pytorch issue 180642). Without gradients
    # a function costs a decoding step more than its kernels.
    is_plain = torch.compiler.is_compiling() or not torch.is_grad_enabled()
    turn = _Rotate._turn if is_plain else _Rotate.apply
    return turn(x_BTNH, *rotation)
