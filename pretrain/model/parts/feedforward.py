"""The feed-forward layer of a block, and its activations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from pretrain.config.model import StackConfig


class _ReluSquared(torch.autograd.Function):
    """`max(x, 0)^2`, bit-equal to both functions in half their passes over memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = functional.relu(x)
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return (2 * positive).mul_(grad)


def relu_squared(x: Tensor) -> Tensor:
    """Returns `max(x, 0)^2` (So et al. 2021, 3)."""
    # Called here: torch 2.11 does not compile an `apply` that is an attribute of a module.
    squared: Tensor = _ReluSquared.apply(x)
    return squared


def quick_gelu(x: Tensor) -> Tensor:
    """Returns `x sigmoid(1.702 x)` (Hendrycks and Gimpel 2016, 2)."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "silu": functional.silu,
    "relu": functional.relu,
    "relu2": relu_squared,
}


class Gate(nn.Module):
    """`activation(gate) * up` of both halves of [..., 2F], or of [..., F] the activation alone.

    With `gate_limit` l and `gate_shift` s, `activation(min(gate, l)) * (clamp(up, -l, l) + s)`
    (gpt-oss, as released).
    """

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.gated = config.gated
        self.limit, self.shift = config.gate_limit, config.gate_shift
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.activation(x)
        gate, up = x.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.activation(gate) * (up + self.shift if self.shift else up)


class FeedForward(nn.Module):
    """`down(activation(up(x)))` (Vaswani et al. 2017, 3.3), [B, T, D] to [B, T, D].

    Gated: `down(activation(gate(x)) * up(x))` (Shazeer 2020). `gate` and `up` are one matrix
    product: rows 0..F-1 of `gate_up.weight` are the gate. `width` is F; None: `ff_width`.
    """

    def __init__(self, config: StackConfig, width: int | None = None) -> None:
        super().__init__()
        width = width or config.ff_width
        self.gated = config.gated
        if self.gated:
            self.gate_up = nn.Linear(config.width, 2 * width, bias=config.bias)
        else:
            self.up = nn.Linear(config.width, width, bias=config.bias)
        self.down = nn.Linear(width, config.width, bias=config.bias)
        self.gate = Gate(config)

    def cuts(self) -> dict[str, tuple[int, ...] | None]:
        """Returns the matrices that ranks may share: sections of rows that each has a part of; None: by columns."""
        if self.gated:
            return {"gate_up": (self.gate_up.out_features // 2,) * 2, "down": None}
        return {"up": (), "down": None}

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.gate(self.gate_up(x_BTD) if self.gated else self.up(x_BTD)))
