"""Rotary embedding (Su et al. 2021): queries and keys turn by angles that grow with their position.

rotation = table(positions_BT, offset, length, device)        once a forward
q, k     = rotate(q, rotation), rotate(k, rotation)           in each attention layer
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretrain.config.model import RotaryScaling


class Rotation(NamedTuple):
    """Cosines and sines of the rotary angles, fp32, [T or B T, 1, H]: the second half of H repeats the first.

    The sines of the first half are negated, so that rotating is `x * cos + swap_halves(x) * sin`.
    """

    cos: Tensor
    sin: Tensor


def rotary_frequencies(head_width: int, theta: float, scaling: RotaryScaling | None) -> Tensor:
    """Returns the angle that each pair of dimensions turns by in one position, fp64 [H / 2], on the CPU.

    In fp64, so that large angles keep their digits.
    """
    exponents = torch.arange(0, head_width, 2, dtype=torch.float64, device="cpu") / head_width
    frequencies = theta**-exponents
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # How often a dimension turns within the first training's length; 0 where it is divided, 1 where it is kept.
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


class RotaryTable:
    """Cosines and sines by position, in the layout of Hugging Face: dimension i turns with dimension i + H/2.

    Made when first asked for, and again where a longer row comes: a model on the meta device costs nothing. The tables
    are plain attributes, not buffers: an engine that casts a module to bf16 would round them too.
    """

    def __init__(self, max_seq_len: int, head_width: int, theta: float, scaling: RotaryScaling | None) -> None:
        self._max_seq_len = max_seq_len
        self._frequencies = rotary_frequencies(head_width, theta, scaling)
        self._cos = self._sin = torch.empty(0, head_width)

    def __call__(self, positions_BT: Tensor | None, offset: int, length: int, device: torch.device) -> Rotation:
        """Returns the rotation of `length` positions from `offset` on, or of the given ones."""
        self._ensure(offset + length if positions_BT is None else self._max_seq_len, device)
        rows = slice(offset, offset + length) if positions_BT is None else positions_BT
        return Rotation(self._cos[rows].unsqueeze(-2), self._sin[rows].unsqueeze(-2))

    def _ensure(self, length: int, device: torch.device) -> None:
        if self._cos.shape[0] < length:
            size = min(self._max_seq_len, 1 << (length - 1).bit_length())
            positions = torch.arange(size, dtype=torch.float64, device="cpu")
            angles = torch.outer(positions, self._frequencies)
            self._cos = torch.cat((angles.cos(), angles.cos()), dim=-1).float()
            self._sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).float()
        if self._cos.device != device:
            self._cos, self._sin = self._cos.to(device), self._sin.to(device)


class _Rotate(torch.autograd.Function):
    """`x * cos + swap_halves(x) * sin` in three kernels each way, where autograd's own would take ten."""

    @staticmethod
    def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
        return swapped.mul_(sin).addcmul_(x, cos)

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
    """Turns each head vector by its position's angles; dtype and shape stay.

    The score of a rotated query and key depends on the difference of their positions only.
    """
    return _Rotate.apply(x_BTNH, *rotation)
