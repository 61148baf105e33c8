"""Self-attention of a block: one fused projection, rotation, optional cache, a backend's kernel, output projection."""

from typing import Any

from torch import Tensor, nn

from pretrain.config.model import StackConfig
from pretrain.model.backends.backend import AttentionBackend
from pretrain.model.cache import LayerCache
from pretrain.model.position import Rotation, rotate


class Attention(nn.Module):
    """Multi-head attention, grouped-query where K < N (Ainslie et al. 2023): head n reads key-value head n // (N / K).

    Queries, keys and values are one matrix product: the rows of `qkv.weight` are N query heads, K key heads, K value
    heads, each of H rows.
    """

    def __init__(self, config: StackConfig, backend: AttentionBackend) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.num_kv_heads
        self.head_width, self.dropout = config.per_head_width, config.dropout
        self.qkv = nn.Linear(config.width, (self.heads + 2 * self.kv_heads) * self.head_width, bias=config.bias)
        self.output = nn.Linear(self.heads * self.head_width, config.width, bias=config.bias)
        self.backend = backend

    def forward(self, x_BTD: Tensor, prepared: Any, rotation: Rotation | None, cache: LayerCache | None) -> Tensor:
        """Attends within a sequence.

        Args:
            x_BTD: Input, normalised.
            prepared: What the backend made of the mask, once a forward.
            rotation: Rotary angles of these T positions, or None.
            cache: Earlier keys and values, to which these are added; None outside decoding.
        """
        heads = self.qkv(x_BTD).unflatten(-1, (-1, self.head_width))
        if rotation is None:
            q_BTNH, k_BSKH, v_BSKH = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        else:
            qk, v_BSKH = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
            q_BTNH, k_BSKH = rotate(qk, rotation).split((self.heads, self.kv_heads), dim=2)
        if cache is not None:
            k_BSKH, v_BSKH = cache.append(k_BSKH, v_BSKH)
        dropout = self.dropout if self.training else 0.0
        mixed_BTNH = self.backend.attend(q_BTNH, k_BSKH, v_BSKH, prepared, dropout=dropout)
        return self.output(mixed_BTNH.flatten(2))
