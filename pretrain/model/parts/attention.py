"""Self-attention and cross attention of a block."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pretrain.config.model import StackConfig
from pretrain.model.backends.backend import AttentionBackend
from pretrain.model.kv_cache import LayerCache
from pretrain.model.parts.norm import build_qk_norm, norm_heads
from pretrain.model.parts.rotary import Rotation, rotate
from pretrain.types import Columns


class AttentionContext(NamedTuple):
    """Input of self-attention beside the stream, of T positions.

    Attributes:
        prepared: Mask, prepared by the backend.
        rotation: Rotary angles of these positions. None: they are not rotated.
        cache: Earlier keys and values, extended by these, values as they are mixed. None outside decoding.
        others: Values of these positions to mix with, [B, T, K, H] or [B, T, K H] each.
        columns: Part of the rows that these positions are. None: rows are whole.
    """

    prepared: Any
    rotation: Rotation | None = None
    cache: LayerCache | None = None
    others: tuple[Tensor, ...] = ()
    columns: Columns | None = None


class AttentionOutput(NamedTuple):
    """Result of self-attention; its own values too, before they are mixed, if later layers mix them in."""

    result_BTD: Tensor
    values_BTKH: Tensor | None = None


class SelfAttention(nn.Module):
    """Multi-head attention; grouped-query (Ainslie et al. 2023): head n reads n // (N / K).

    Queries, keys and values are one matrix product: the rows of `qkv.weight` are N query heads, K
    key heads, K value heads, each of H rows; with `attention_gate` also gates of N heads. With
    `value_residual` and `value_embeddings` a layer mixes its values with others, by the factors
    `value_mix`. `sinks`, [N], are scores of a key of each head that has no value
    (`backends/sinks.py`).
    """

    def __init__(self, config: StackConfig, backend: AttentionBackend, number: int) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.num_kv_heads
        self.head_width = config.per_head_width
        self.dropout = config.attention_weight_dropout
        self.scale = config.score_scale
        self.is_gated = config.attention_gate
        self.qkv = nn.Linear(config.width, sum(self.rows()), bias=config.has_qkv_bias)
        self.query_norm = None
        self.key_norm = None
        if config.qk_norm:
            self.query_norm = build_qk_norm(config, self.heads)
            self.key_norm = build_qk_norm(config, self.kv_heads)
        self.returns_values = config.value_residual and number == 0
        parts = config.value_parts(number)
        self.value_mix = nn.Parameter(torch.empty(parts)) if parts > 1 else None
        self.sinks = nn.Parameter(torch.empty(config.heads)) if config.attention_sinks else None
        self.output = nn.Linear(self.heads * self.head_width, config.width, bias=config.has_output_bias)
        self.backend = backend

    def rows(self) -> tuple[int, ...]:
        """Returns the rows of queries, keys, values and gates."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return tuple(number * self.head_width for number in heads[: 3 + self.is_gated])

    def cuts(self) -> dict[str, tuple[int, ...] | None]:
        """Returns the matrices that ranks may share: sections of rows that each has a part of; None: by columns."""
        return {"qkv": self.rows(), "output": None}

    def forward(self, x_BTD: Tensor, context: AttentionContext) -> AttentionOutput:
        """Attends within a sequence, under a prepared mask."""
        prepared, rotation, cache, tables, _ = context
        projected = self.qkv(x_BTD)
        # Its own lengths: ranks that share matrices gather the columns of all.
        heads = projected.view(*projected.shape[:2], -1, self.head_width)  # [B, T, N + 2 K, H]
        sizes = (self.heads, self.kv_heads, self.kv_heads, self.heads)[: 3 + self.is_gated]
        if rotation is not None and self.query_norm is None:
            # Queries and keys are adjacent: one rotation of both instead of two.
            qk, own_BTKH, *gate = heads.split_with_sizes((sum(sizes[:2]), *sizes[2:]), dim=2)
            q_BTNH, k_BSKH = rotate(qk, rotation).split_with_sizes(sizes[:2], dim=2)
        else:
            # Elsewhere one split, whose gradient is one copy.
            q_BTNH, k_BSKH, own_BTKH, *gate = heads.split_with_sizes(sizes, dim=2)
        v_BSKH = own_BTKH if self.value_mix is None else mix_values(self.value_mix, own_BTKH, tables)
        if self.query_norm is not None and self.key_norm is not None:
            q_BTNH = norm_heads(self.query_norm, q_BTNH)
            k_BSKH = norm_heads(self.key_norm, k_BSKH)
            if rotation is not None:
                q_BTNH = rotate(q_BTNH, rotation)
                k_BSKH = rotate(k_BSKH, rotation)
        if cache is not None:
            k_BSKH, v_BSKH = cache.append(k_BSKH, v_BSKH)
        options: dict[str, Any] = {"dropout": self.dropout if self.training else 0.0, "scale": self.scale}
        mixed_BTNH = self.backend.attend(q_BTNH, k_BSKH, v_BSKH, prepared, sinks_N=self.sinks, **options)
        if gate:
            mixed_BTNH = mixed_BTNH * gate[0].sigmoid()
        result_BTD = self.output(mixed_BTNH.flatten(2))
        return AttentionOutput(result_BTD, own_BTKH if self.returns_values else None)


def mix_values(factors: Tensor, own_BTKH: Tensor, others: tuple[Tensor, ...]) -> Tensor:
    """Returns the sum of a layer's values and of others by a factor each, in its own dtype."""
    mixed_BTKH = factors[0] * own_BTKH
    for factor, other in zip(factors[1:], others, strict=True):
        # Under autocast an embedding is fp32.
        mixed_BTKH = mixed_BTKH + factor * other.view_as(own_BTKH).to(own_BTKH.dtype)
    return mixed_BTKH


class CrossAttention(nn.Module):
    """Attention of a decoder to the encoder's output (Vaswani et al. 2017, 3.2.3), no positions.

    Keys and values are one matrix product: the rows of `key_value.weight` are K key heads, then K
    value heads.
    """

    def __init__(self, config: StackConfig, backend: AttentionBackend) -> None:
        super().__init__()
        self.head_width = config.per_head_width
        self.dropout = config.attention_weight_dropout
        self.scale = config.score_factor if config.scaled_attention else 1.0
        query_width = config.heads * self.head_width
        kv_width = config.num_kv_heads * self.head_width
        self.query = nn.Linear(config.width, query_width, bias=config.has_qkv_bias)
        self.key_value = nn.Linear(config.width, 2 * kv_width, bias=config.has_qkv_bias)
        self.output = nn.Linear(query_width, config.width, bias=config.has_output_bias)
        self.backend = backend

    def cuts(self) -> dict[str, tuple[int, ...] | None]:
        """Returns the matrices that ranks may share: sections of rows that each has a part of; None: by columns."""
        return {"query": (), "key_value": (self.key_value.out_features // 2,) * 2, "output": None}

    def forward(self, x_BTD: Tensor, memory_BSD: Tensor | None, prepared: Any, cache: LayerCache | None) -> Tensor:
        """Attends to the encoder's output, under a prepared mask.

        The cache stores keys and values of the source at the first step; after it, and without
        `memory_BSD`, they are read from there. None outside decoding.
        """
        q_BTNH = self.query(x_BTD).unflatten(-1, (-1, self.head_width))
        if memory_BSD is not None:
            heads = self.key_value(memory_BSD).unflatten(-1, (-1, self.head_width))
            k_BSKH, v_BSKH = heads.chunk(2, dim=2)
            if cache is not None:
                cache.cross = (k_BSKH.detach(), v_BSKH.detach())
        else:
            assert cache is not None and cache.cross is not None, "no encoder output, and no filled cache"
            k_BSKH, v_BSKH = cache.cross
        dropout = self.dropout if self.training else 0.0
        mixed_BTNH = self.backend.attend(q_BTNH, k_BSKH, v_BSKH, prepared, dropout=dropout, scale=self.scale)
        return self.output(mixed_BTNH.flatten(2))
