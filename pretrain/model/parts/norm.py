"""Norms of a stack, and of queries and keys."""

import torch
from torch import Tensor, nn

from pretrain.config.model import StackConfig


def build_norm(config: StackConfig, width: int | None = None) -> nn.Module:
    """Builds a norm of the stack's width or another: RMSNorm (Zhang and Sennrich 2019) or LayerNorm."""
    width = width or config.width
    # Both are torch's fused functions, with statistics in fp32 for any dtype of the input.
    if config.norm == "rms":
        return build_rms_norm(config, width)
    has_weight = config.norm == "layer"
    return nn.LayerNorm(width, eps=config.norm_eps, elementwise_affine=has_weight, bias=config.has_norm_bias)


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


def norm_heads(norm: nn.RMSNorm | nn.LayerNorm, x_BTNH: Tensor) -> Tensor:
    """Normalises each head, or all heads of a position together if the norm is as wide as these."""
    if norm.normalized_shape[0] == x_BTNH.shape[-1]:
        return norm(x_BTNH)
    return norm(x_BTNH.flatten(2)).view_as(x_BTNH)
