"""Latent attention of a block."""

import torch
from torch import Tensor, nn

from pretrain.config.model import StackConfig
from pretrain.model.backends.backend import AttentionBackend
from pretrain.model.parts.attention import AttentionContext, AttentionOutput
from pretrain.model.parts.rotary import rotate


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
        eps = latent.norm_eps or config.norm_eps
        self.query_down = None if latent.query_rank is None else nn.Linear(config.width, inputs, bias=False)
        self.query_norm = None if latent.query_rank is None else nn.RMSNorm(inputs, eps=eps)
        self.query_up = nn.Linear(inputs, self.heads * self.head_width, bias=False)
        self.kv_down = nn.Linear(config.width, latent.kv_rank + latent.rope_width, bias=False)
        self.kv_norm = nn.RMSNorm(latent.kv_rank, eps=eps)
        kept_width = self.head_width - latent.rope_width
        self.kv_up = nn.Linear(latent.kv_rank, self.heads * (kept_width + latent.value_width), bias=False)
        self.output = nn.Linear(self.heads * latent.value_width, config.width, bias=False)
        self.backend = backend

    def forward(self, x_BTD: Tensor, context: AttentionContext) -> AttentionOutput:
        """Attends within a sequence, under a prepared mask."""
        prepared, rotation, cache, tables, _ = context
        assert rotation is not None and not tables, "checked by the config"
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
