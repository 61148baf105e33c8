"""The feed-forward layer of a block: plain (Vaswani et al. 2017, 3.3) or gated (Shazeer 2020)."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from pretrain.config.model import StackConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "relu": functional.relu,
}


class FeedForward(nn.Module):
    """`down(activation(up(x)))`, [B, T, D] to the same."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.ff_width, bias=config.bias)
        self.down = nn.Linear(config.ff_width, config.width, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x_BTD)))


class GatedFeedForward(nn.Module):
    """`down(activation(gate(x)) * up(x))`, [B, T, D] to the same.

    `gate` and `up` are one matrix product: rows 0..F-1 of `gate_up.weight` are the gate's.
    """

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.ff_width, bias=config.bias)
        self.down = nn.Linear(config.ff_width, config.width, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = self.gate_up(x_BTD).chunk(2, dim=-1)
        return self.down(self.activation(gate_BTF) * up_BTF)


def build_feedforward(config: StackConfig) -> nn.Module:
    """Builds the feed-forward layer of a stack's blocks."""
    return GatedFeedForward(config) if config.gated else FeedForward(config)
