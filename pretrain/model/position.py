"""How order enters a stack: a learned table added to its input, a rotation of queries and keys, or not at all.

    x_BTD, rotation = stack.position(x_BTD, positions_BT, offset)    once a forward
    q, k            = rotate(q, rotation), rotate(k, rotation)       in each attention layer, if there is a rotation

Not here: rescaled rotary frequencies, relative biases.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pretrain.config.model import StackConfig


class Rotation(NamedTuple):
    """Cosines and sines of the rotary angles, fp32, [T or B T, 1, H]: the second half of H repeats the first.

    The sines of the first half are negated, so that rotating is `x * cos + swap_halves(x) * sin`.
    """

    cos: Tensor
    sin: Tensor


class NoPosition(nn.Module):
    """Order does not enter: attention alone, with its mask, tells positions apart."""

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None, offset: int) -> tuple[Tensor, Rotation | None]:
        return x_BTD, None


class LearnedPosition(nn.Module):
    """A table of `max_seq_len` vectors, added to the stack's input (GPT-2, BERT)."""

    def __init__(self, max_seq_len: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_seq_len, width))

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None, offset: int) -> tuple[Tensor, Rotation | None]:
        if positions_BT is None:
            return x_BTD + self.weight[offset : offset + x_BTD.shape[1]], None
        return x_BTD + nn.functional.embedding(positions_BT, self.weight), None


class RotaryPosition(nn.Module):
    """Rotary embedding (Su et al. 2021), in the layout of Hugging Face: dimension i turns with dimension i + H/2.

    The tables are fp32 attributes, not buffers: an engine that casts a module to bf16 would round them too.
    """

    def __init__(self, max_seq_len: int, head_width: int, theta: float) -> None:
        super().__init__()
        # In fp64, so that large angles keep their digits; on the CPU even while the model is built on the meta device.
        exponents = torch.arange(0, head_width, 2, dtype=torch.float64, device="cpu") / head_width
        positions = torch.arange(max_seq_len, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, theta**-exponents)
        self._cos = torch.cat((angles.cos(), angles.cos()), dim=-1).float()
        self._sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).float()

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None, offset: int) -> tuple[Tensor, Rotation | None]:
        if self._cos.device != x_BTD.device:
            self._cos, self._sin = self._cos.to(x_BTD.device), self._sin.to(x_BTD.device)
        rows = slice(offset, offset + x_BTD.shape[1]) if positions_BT is None else positions_BT
        return x_BTD, Rotation(self._cos[rows].unsqueeze(-2), self._sin[rows].unsqueeze(-2))


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


def build_position(config: StackConfig, max_seq_len: int) -> nn.Module:
    """Builds the position module of a stack; called as `(x_BTD, positions_BT | None, offset) -> (x_BTD, rotation)`."""
    if config.position == "learned":
        return LearnedPosition(max_seq_len, config.width)
    if config.position == "rotary":
        return RotaryPosition(max_seq_len, config.per_head_width, config.rope_theta)
    return NoPosition()
