"""One Transformer block: attention and feed-forward, each with its norm and its residual sum."""

from typing import Any

from torch import Tensor, nn

from pretrain.config.model import StackConfig
from pretrain.model.attention import Attention
from pretrain.model.backends.backend import AttentionBackend
from pretrain.model.cache import LayerCache
from pretrain.model.feedforward import build_feedforward
from pretrain.model.norm import build_norm
from pretrain.model.position import Rotation


class Block(nn.Module):
    """Pre-norm (`x + f(norm(x))`, GPT-2 2.3) or post-norm (`norm(x + f(x))`, Vaswani et al. 2017, 3.1)."""

    def __init__(self, config: StackConfig, backend: AttentionBackend) -> None:
        super().__init__()
        self.pre_norm = config.norm_placement == "pre"
        self.attention_norm = build_norm(config)
        self.attention = Attention(config, backend)
        self.feedforward_norm = build_norm(config)
        self.feedforward = build_feedforward(config)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x_BTD: Tensor, prepared: Any, rotation: Rotation | None, cache: LayerCache | None) -> Tensor:
        """Maps [B, T, D] to the same; the other arguments are those of `Attention.forward`."""
        if self.pre_norm:
            x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), prepared, rotation, cache))
            return x_BTD + self.dropout(self.feedforward(self.feedforward_norm(x_BTD)))
        x_BTD = self.attention_norm(x_BTD + self.dropout(self.attention(x_BTD, prepared, rotation, cache)))
        return self.feedforward_norm(x_BTD + self.dropout(self.feedforward(x_BTD)))
