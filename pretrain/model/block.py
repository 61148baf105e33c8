"""One Transformer block: self-attention, cross attention if there is an encoder, feed-forward, norms, residual sums."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from pretrain.config.model import StackConfig
from pretrain.model.attention import CrossAttention, LayerCache, SelfAttention
from pretrain.model.backends.backend import AttentionBackend
from pretrain.model.position import Rotation


def build_norm(config: StackConfig) -> nn.Module:
    """Builds the norm of a stack, [..., D] to [..., D].

    RMSNorm (Zhang and Sennrich 2019) has a weight only, LayerNorm (Ba et al. 2016) a bias too if the stack has
    biases. Both are torch's fused functions, with statistics in fp32 for any dtype of the input.
    """
    if config.norm == "rms":
        return nn.RMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "relu": functional.relu,
}


class FeedForward(nn.Module):
    """`down(activation(up(x)))`, [B, T, D] to [B, T, D] (Vaswani et al. 2017, 3.3)."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.ff_width, bias=config.bias)
        self.down = nn.Linear(config.ff_width, config.width, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x_BTD)))


class GatedFeedForward(nn.Module):
    """`down(activation(gate(x)) * up(x))`, [B, T, D] to [B, T, D] (Shazeer 2020).

    `gate` and `up` are one matrix product: rows 0..F-1 of `gate_up.weight` are the gate.
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


class Memory(NamedTuple):
    """Input of cross attention.

    Attributes:
        hidden_BSD: The encoder's output; None if a cache has its keys and values.
        prepared: Mask over the source, as prepared by the backend.
    """

    hidden_BSD: Tensor | None
    prepared: Any


class Block(nn.Module):
    """Pre-norm (`x + f(norm(x))`, GPT-2 2.3) or post-norm (`norm(x + f(x))`, Vaswani et al. 2017, 3.1).

    Args:
        config: Config of the stack.
        backend: Kernel of self-attention.
        cross_backend: Kernel of cross attention; None: no cross attention.
        first: First block of the stack; its input is normalised already if the stack has an `input_norm`.
    """

    def __init__(
        self, config: StackConfig, backend: AttentionBackend, cross_backend: AttentionBackend | None, *, first: bool
    ) -> None:
        super().__init__()
        self.pre_norm = config.norm_placement == "pre"
        skip_norm = first and self.pre_norm and config.input_norm
        self.attention_norm = nn.Identity() if skip_norm else build_norm(config)
        self.attention = SelfAttention(config, backend)
        self.cross_norm = None if cross_backend is None else build_norm(config)
        self.cross = None if cross_backend is None else CrossAttention(config, cross_backend)
        self.feedforward_norm = build_norm(config)
        self.feedforward = build_feedforward(config)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(
        self,
        x_BTD: Tensor,
        prepared: Any,
        rotation: Rotation | None = None,
        memory: Memory | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Maps [B, T, D] to [B, T, D]; the other arguments as in `SelfAttention` and `CrossAttention`."""
        x_BTD = self._add(x_BTD, self.attention_norm, lambda x: self.attention(x, prepared, rotation, cache))
        cross, cross_norm = self.cross, self.cross_norm
        if cross is not None and cross_norm is not None:
            assert memory is not None, "a decoder with cross attention needs a source"
            hidden_BSD, cross_prepared = memory
            x_BTD = self._add(x_BTD, cross_norm, lambda x: cross(x, hidden_BSD, cross_prepared, cache))
        return self._add(x_BTD, self.feedforward_norm, self.feedforward)

    def _add(self, x_BTD: Tensor, norm: nn.Module, layer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre_norm:
            return x_BTD + self.dropout(layer(norm(x_BTD)))
        return norm(x_BTD + self.dropout(layer(x_BTD)))
