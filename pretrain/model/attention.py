"""Self-attention and cross attention of a block, and the key-value cache of decoding."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pretrain.config.model import StackConfig
from pretrain.model.backends.backend import AttentionBackend
from pretrain.model.rotary import Rotation, rotate

FEWEST_KEYS = 256
"""Fewest cached positions of a step of fixed shapes: fewer save no time, and cost captures."""


class CachePlace(NamedTuple):
    """Place of T new positions in a cache: the first of them, and the cached ones they read, S.

    `position_1`: the one new position on the device, int64 [1], in a step of fixed shapes: it is
    not `offset`, and cached positions after it are to be hidden.
    """

    offset: int
    keys: int
    position_1: Tensor | None = None


class LayerCache:
    """Keys and values of one layer, for at most `capacity` positions, and those of the source.

    `cross` are keys and values of cross attention, [B, S, K, H] each, set at the first step; None
    without an encoder. Appending writes in place: not for training. `fixed`: of `KVCache.fix`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.fixed: CachePlace | None = None
        self.cross: tuple[Tensor, Tensor] | None = None
        self._past: list[Tensor] = []

    def append(self, *added: Tensor) -> list[Tensor]:
        """Adds keys and values of T positions; returns views of all so far, [B, S, K, H] each."""
        if self.fixed is not None and self.fixed.position_1 is not None:
            for past, x in zip(self._past, added, strict=True):
                past.index_copy_(1, self.fixed.position_1, x)
            return [past[:, : self.fixed.keys] for past in self._past]
        start = self.length
        self.length += added[0].shape[1]
        needed = f"cache of {self.capacity} positions is full: {self.length} needed"
        assert self.length <= self.capacity, needed
        if not self._past:
            # In the dtype and on the device of the first keys. Zeros: a hidden NaN would spread.
            self._past = [x.new_zeros(x.shape[0], self.capacity, *x.shape[2:]) for x in added]
        for past, x in zip(self._past, added, strict=True):
            past[:, start : self.length] = x
        return [past[:, : self.length] for past in self._past]

    def select(self, rows_B: Tensor) -> None:
        """Selects rows, in the given order; a row may occur several times."""
        for number, past in enumerate(self._past):
            selected = past[rows_B, : self.length]
            if len(rows_B) != len(past):
                past = self._past[number] = past.new_zeros((len(rows_B), *past.shape[1:]))
            past[:, : self.length] = selected
        if self.cross is not None:
            self.cross = (select_rows(self.cross[0], rows_B), select_rows(self.cross[1], rows_B))


def select_rows(x: Tensor, rows_B: Tensor) -> Tensor:
    """Returns the given rows, in the memory of `x` if they are as many: a captured step reads them there."""
    selected = x[rows_B]
    return x.copy_(selected) if len(rows_B) == len(x) else selected


class KVCache:
    """The caches of a stack's layers; costs `2 x layers x rows x capacity x K x H` elements.

    Layers without heads have the document numbers of the cached positions, for padded prompts, and
    the tokens, for embeddings of n-grams.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.layers = [LayerCache(capacity) for _ in range(layers)]
        self._documents = LayerCache(capacity)
        self._tokens = LayerCache(capacity)
        self._all = (*self.layers, self._documents, self._tokens)
        self._position_1: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of cached positions: the position of the next token."""
        return self.layers[0].length

    def place(self, queries: int) -> CachePlace:
        """Returns the place of the next positions."""
        return self.layers[0].fixed or CachePlace(self.length, self.length + queries)

    def append_documents(self, documents_BT: Tensor) -> Tensor:
        """Appends the document numbers of T positions, and returns all, [B, S]."""
        return self._documents.append(documents_BT)[0]

    def append_tokens(self, tokens_BT: Tensor) -> Tensor:
        """Appends the ids of T positions, and returns all, [B, S]."""
        return self._tokens.append(tokens_BT)[0]

    def fix(self, device: torch.device) -> int:
        """Fixes the shapes of the next step, of one token a row; returns the positions it reads.

        Such a step reads its position on the device, and has the same shapes up to the next power
        of two, so that it can be captured and replayed. `advance` follows it. For good: no other
        step comes after it. Under the backends `auto`, `sdpa` and `eager`.
        """
        keys = min(self.layers[0].capacity, max(FEWEST_KEYS, 1 << self.length.bit_length()))
        if self._position_1 is None:
            self._position_1 = torch.full((1,), self.length, device=device)
        for layer in self._all:
            layer.fixed = CachePlace(keys - 1, keys, self._position_1)
        return keys

    def advance(self) -> None:
        """Counts the token of a step of fixed shapes, on the device too."""
        assert self._position_1 is not None, "the step was fixed"
        self._position_1.add_(1)
        for layer in self._all:
            layer.length += 1

    def select(self, rows_B: Tensor) -> None:
        """Selects rows of every layer, in the given order, as after a step of a beam search."""
        for layer in self._all:
            layer.select(rows_B)


class OffsetRMSNorm(nn.RMSNorm):
    """RMSNorm that multiplies by one plus its weight (Gemma)."""

    def forward(self, x: Tensor) -> Tensor:
        # In fp32 under any precision: near 1 the steps of 16 bits are those of a weight of 1.
        scale = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) + 1.0
        exact = torch.promote_types(x.dtype, torch.float32)
        normed = nn.functional.rms_norm(x.to(exact), self.normalized_shape, scale.to(exact), self.eps)
        return normed.to(x.dtype)


def build_rms_norm(config: StackConfig, width: int) -> nn.RMSNorm:
    """Builds an RMSNorm of a stack (Zhang and Sennrich 2019)."""
    return (OffsetRMSNorm if config.norm_offset else nn.RMSNorm)(width, eps=config.norm_eps)


class HeadsLayerNorm(nn.LayerNorm):
    """LayerNorm of each head of [..., N H], with weights of all heads, no bias (Command R+)."""

    def __init__(self, heads: int, width: int, eps: float) -> None:
        super().__init__(heads * width, eps=eps, bias=False)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        # In fp32 under any precision, as the product with a weight within torch's own kernel.
        exact = torch.promote_types(x.dtype, torch.float32)
        heads = x.to(exact).unflatten(-1, (self.heads, -1))
        normed = nn.functional.layer_norm(heads, heads.shape[-1:], eps=self.eps)
        return (normed.flatten(-2) * self.weight.to(exact)).to(x.dtype)


def build_qk_norm(config: StackConfig, heads: int) -> nn.RMSNorm | nn.LayerNorm:
    """Builds the norm of queries or of keys, which have as many heads."""
    if config.qk_norm == "heads":
        return HeadsLayerNorm(heads, config.per_head_width, config.norm_eps)
    if config.qk_norm == "layer":
        return nn.LayerNorm(config.per_head_width, eps=config.norm_eps, bias=config.has_qk_norm_bias)
    return build_rms_norm(config, config.qk_norm_width(heads))


class AttentionContext(NamedTuple):
    """Input of self-attention beside the stream, of T positions.

    Attributes:
        prepared: Mask, prepared by the backend.
        rotation: Rotary angles of these positions. None: they are not rotated.
        cache: Earlier keys and values, extended by these, values as they are mixed. None outside decoding.
        others: Values of these positions to mix with, [B, T, K, H] or [B, T, K H] each.
    """

    prepared: Any
    rotation: Rotation | None = None
    cache: LayerCache | None = None
    others: tuple[Tensor, ...] = ()


class AttentionOutput(NamedTuple):
    """Result of self-attention; its own values too, before they are mixed, if later layers mix them in."""

    result_BTD: Tensor
    values_BTKH: Tensor | None = None


class SelfAttention(nn.Module):
    """Multi-head attention; grouped-query (Ainslie et al. 2023): head n reads n // (N / K).

    Queries, keys and values are one matrix product: the rows of `qkv.weight` are N query heads, K
    key heads, K value heads, each of H rows. With `value_residual` and `value_embeddings` a layer
    mixes its values with others, by the factors `value_mix`. `sinks`, [N], are scores of a key of
    each head that has no value (`backends/sinks.py`).
    """

    def __init__(self, config: StackConfig, backend: AttentionBackend, number: int) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.num_kv_heads
        self.head_width = config.per_head_width
        self.dropout = config.attention_weight_dropout
        self.scale = config.score_scale
        qkv_width = (self.heads + 2 * self.kv_heads) * self.head_width
        self.qkv = nn.Linear(config.width, qkv_width, bias=config.has_qkv_bias)
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

    def forward(self, x_BTD: Tensor, context: AttentionContext) -> AttentionOutput:
        """Attends within a sequence, under a prepared mask."""
        prepared, rotation, cache, others = context
        heads = self.qkv(x_BTD).unflatten(-1, (-1, self.head_width))  # [B, T, N + 2 K, H]
        qk, own_BTKH = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
        v_BSKH = own_BTKH if self.value_mix is None else mix_values(self.value_mix, own_BTKH, others)
        if self.query_norm is not None and self.key_norm is not None:
            q_BTNH, k_BSKH = qk.split((self.heads, self.kv_heads), dim=2)
            q_BTNH = norm_heads(self.query_norm, q_BTNH)
            k_BSKH = norm_heads(self.key_norm, k_BSKH)
            if rotation is not None:
                q_BTNH = rotate(q_BTNH, rotation)
                k_BSKH = rotate(k_BSKH, rotation)
        else:
            # Queries and keys are adjacent: one rotation of both instead of two.
            qk = qk if rotation is None else rotate(qk, rotation)
            q_BTNH, k_BSKH = qk.split((self.heads, self.kv_heads), dim=2)
        if cache is not None:
            k_BSKH, v_BSKH = cache.append(k_BSKH, v_BSKH)
        options: dict[str, Any] = {"dropout": self.dropout if self.training else 0.0, "scale": self.scale}
        mixed_BTNH = self.backend.attend(q_BTNH, k_BSKH, v_BSKH, prepared, sinks_N=self.sinks, **options)
        result_BTD = self.output(mixed_BTNH.flatten(2))
        return AttentionOutput(result_BTD, own_BTKH if self.returns_values else None)


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, 2.1).

        x -> query_down, norm, query_up (or `query`)   -> queries, each [rotated r, H - r]
        x -> kv_down -> vector of `kv_rank`, norm, kv_up -> of each head a key [H - r], then a value
                     -> key [r], rotated, shared by heads

    A cache holds the normed vector and the rotated key of a position, `kv_rank + r` numbers for all
    heads. Values are lengthened to H by zeros, for kernels whose heads have one width.
    """

    def __init__(self, config: StackConfig, backend: AttentionBackend) -> None:
        super().__init__()
        latent = config.latent
        assert latent is not None
        self.heads, self.head_width = config.heads, config.per_head_width
        self.latent = latent
        self.dropout = config.attention_weight_dropout
        self.scale = config.score_scale
        inputs = latent.query_rank or config.width
        self.query_down = None if latent.query_rank is None else nn.Linear(config.width, inputs, bias=False)
        self.query_norm = None if latent.query_rank is None else nn.RMSNorm(inputs, eps=config.norm_eps)
        self.query_up = nn.Linear(inputs, self.heads * self.head_width, bias=False)
        self.kv_down = nn.Linear(config.width, latent.kv_rank + latent.rope_width, bias=False)
        self.kv_norm = nn.RMSNorm(latent.kv_rank, eps=config.norm_eps)
        kept_width = self.head_width - latent.rope_width
        self.kv_up = nn.Linear(latent.kv_rank, self.heads * (kept_width + latent.value_width), bias=False)
        self.output = nn.Linear(self.heads * latent.value_width, config.width, bias=False)
        self.backend = backend

    def forward(self, x_BTD: Tensor, context: AttentionContext) -> AttentionOutput:
        """Attends within a sequence, under a prepared mask."""
        prepared, rotation, cache, others = context
        assert rotation is not None and not others, "checked by the config"
        latent, width = self.latent, self.head_width
        queries = x_BTD
        if self.query_down is not None and self.query_norm is not None:
            queries = self.query_norm(self.query_down(x_BTD))
        q_BTNH = rotate(self.query_up(queries).unflatten(-1, (self.heads, width)), rotation)
        # One head of each, so that a cache takes them as keys and values.
        down_BS1 = self.kv_down(x_BTD)[:, :, None]
        latent_BS1, shared_BS1 = down_BS1.split((latent.kv_rank, latent.rope_width), dim=-1)
        latent_BS1, shared_BS1 = self.kv_norm(latent_BS1), rotate(shared_BS1, rotation)
        if cache is not None:
            latent_BS1, shared_BS1 = cache.append(latent_BS1, shared_BS1)
        heads_BSN = self.kv_up(latent_BS1[:, :, 0]).unflatten(-1, (self.heads, -1))
        key_BSN, value_BSN = heads_BSN.split((width - latent.rope_width, latent.value_width), dim=-1)
        k_BSNH = torch.cat((shared_BS1.to(key_BSN.dtype).expand(-1, -1, self.heads, -1), key_BSN), dim=-1)
        v_BSNH = nn.functional.pad(value_BSN, (0, width - latent.value_width))
        dropout = self.dropout if self.training else 0.0
        mixed_BTNH = self.backend.attend(q_BTNH, k_BSNH, v_BSNH, prepared, dropout=dropout, scale=self.scale)
        return AttentionOutput(self.output(mixed_BTNH[..., : latent.value_width].flatten(2)))


def build_attention(config: StackConfig, backend: AttentionBackend, number: int) -> SelfAttention | LatentAttention:
    """Builds the self-attention of a block."""
    return LatentAttention(config, backend) if config.latent else SelfAttention(config, backend, number)


def norm_heads(norm: nn.RMSNorm | nn.LayerNorm, x_BTNH: Tensor) -> Tensor:
    """Normalises each head, or all heads of a position together if the norm is as wide as these."""
    if norm.normalized_shape[0] == x_BTNH.shape[-1]:
        return norm(x_BTNH)
    return norm(x_BTNH.flatten(2)).view_as(x_BTNH)


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
