"""Attention of a block: projections, rotation, optional cache, a backend's kernel, output projection."""

from typing import Any

from torch import Tensor, nn

from pretrain.config.model import StackConfig
from pretrain.model.backends.backend import AttentionBackend
from pretrain.model.cache import LayerCache
from pretrain.model.rotary import Rotation, rotate


class SelfAttention(nn.Module):
    """Multi-head attention, grouped-query where K < N (Ainslie et al. 2023): head n reads key-value head n // (N / K).

    Queries, keys and values are one matrix product: the rows of `qkv.weight` are N query heads, K key heads, K value
    heads, each of H rows.
    """

    def __init__(self, config: StackConfig, backend: AttentionBackend) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = config.heads, config.num_kv_heads, config.per_head_width
        self.dropout, self.scale = config.attention_weight_dropout, None if config.scaled_attention else 1.0
        qkv_width = (self.heads + 2 * self.kv_heads) * self.head_width
        self.qkv = nn.Linear(config.width, qkv_width, bias=config.has_qkv_bias)
        self.query_norm = nn.RMSNorm(self.head_width, eps=config.norm_eps) if config.qk_norm else None
        self.key_norm = nn.RMSNorm(self.head_width, eps=config.norm_eps) if config.qk_norm else None
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
        qk, v_BSKH = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
        if self.query_norm is not None and self.key_norm is not None:
            q_BTNH, k_BSKH = qk.split((self.heads, self.kv_heads), dim=2)
            q_BTNH, k_BSKH = self.query_norm(q_BTNH), self.key_norm(k_BSKH)
            if rotation is not None:
                q_BTNH, k_BSKH = rotate(q_BTNH, rotation), rotate(k_BSKH, rotation)
        else:
            qk = qk if rotation is None else rotate(qk, rotation)
            q_BTNH, k_BSKH = qk.split((self.heads, self.kv_heads), dim=2)
        if cache is not None:
            k_BSKH, v_BSKH = cache.append(k_BSKH, v_BSKH)
        dropout = self.dropout if self.training else 0.0
        mixed_BTNH = self.backend.attend(q_BTNH, k_BSKH, v_BSKH, prepared, dropout=dropout, scale=self.scale)
        return self.output(mixed_BTNH.flatten(2))


class CrossAttention(nn.Module):
    """Attention of a decoder to the encoder's output (Vaswani et al. 2017, 3.2.3); order does not enter.

    Keys and values are one matrix product: the rows of `key_value.weight` are K key heads, then K value heads.
    """

    def __init__(self, config: StackConfig, backend: AttentionBackend) -> None:
        super().__init__()
        self.head_width, self.dropout = config.per_head_width, config.attention_weight_dropout
        self.scale = None if config.scaled_attention else 1.0
        query_width, kv_width = config.heads * self.head_width, config.num_kv_heads * self.head_width
        self.query = nn.Linear(config.width, query_width, bias=config.has_qkv_bias)
        self.key_value = nn.Linear(config.width, 2 * kv_width, bias=config.has_qkv_bias)
        self.output = nn.Linear(query_width, config.width, bias=config.bias)
        self.backend = backend

    def forward(self, x_BTD: Tensor, memory_BSD: Tensor | None, prepared: Any, cache: LayerCache | None) -> Tensor:
        """Attends to the source.

        Args:
            x_BTD: Input, normalised.
            memory_BSD: The encoder's output; None where the cache has its keys and values.
            prepared: What the backend made of the mask, once a forward.
            cache: Keeps the source's keys and values from the first step on; None outside decoding.
        """
        q_BTNH = self.query(x_BTD).unflatten(-1, (-1, self.head_width))
        if memory_BSD is None:
            assert cache is not None and cache.cross is not None, (
                "without the encoder's output a filled cache is needed"
            )
            k_BSKH, v_BSKH = cache.cross
        else:
            k_BSKH, v_BSKH = self.key_value(memory_BSD).unflatten(-1, (-1, self.head_width)).chunk(2, dim=2)
            if cache is not None:
                cache.cross = (k_BSKH, v_BSKH)
        dropout = self.dropout if self.training else 0.0
        mixed_BTNH = self.backend.attend(q_BTNH, k_BSKH, v_BSKH, prepared, dropout=dropout, scale=self.scale)
        return self.output(mixed_BTNH.flatten(2))
