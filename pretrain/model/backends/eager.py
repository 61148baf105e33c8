"""`eager`: attention as the formula says, in any dtype. The reference of the others; quadratic memory."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.model.backends.backend import AttentionNeeds, DistanceBias
from pretrain.model.backends.dense import dense_bias, dense_mask
from pretrain.types import AttentionMask


@dataclass(frozen=True, slots=True)
class EagerMask:
    """A mask and a bias of every pair.

    Attributes:
        allowed: Bool, broadcastable to [B, N, T, S]: True where a query may see a key. None: everything is visible.
        bias_NTS: Added to the scores. None: nothing is.
    """

    allowed: Tensor | None
    bias_NTS: Tensor | None


class EagerAttention:
    """Materialises the scores of every pair: every mask, bias, dropout and dtype, float64 too, with gradients."""

    def __init__(self, needs: AttentionNeeds) -> None:
        pass

    def prepare(
        self,
        mask: AttentionMask,
        *,
        rows: int,
        queries: int,
        keys: int,
        device: torch.device,
        bias: DistanceBias | None = None,
    ) -> EagerMask:
        """Materialises the mask and the bias."""
        bias_NTS = None
        if bias is not None:
            bias_NTS = dense_bias(bias, queries=range(queries), keys=range(keys), num_queries=queries)
        return EagerMask(dense_mask(mask, queries=range(queries), keys=range(keys), device=device), bias_NTS)

    def attend(
        self,
        q_BTNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        prepared: EagerMask,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        """Attends in the dtype of its inputs, which is float64 where exactness is wanted."""
        weights_BNTS = self.weights(q_BTNH, k_BSKH, prepared, scale=scale)
        weights_BNTS = torch.nn.functional.dropout(weights_BNTS, dropout).to(v_BSKH.dtype)
        v_BSNH = v_BSKH.repeat_interleave(q_BTNH.shape[2] // v_BSKH.shape[2], dim=2)
        return torch.einsum("bnts,bsnh->btnh", weights_BNTS, v_BSNH)

    def weights(self, q_BTNH: Tensor, k_BSKH: Tensor, prepared: EagerMask, *, scale: float | None) -> Tensor:
        """Returns the attention weights before dropout, [B, N, T, S]; those of a query that sees no key are 0."""
        k_BSNH = k_BSKH.repeat_interleave(q_BTNH.shape[2] // k_BSKH.shape[2], dim=2)
        factor = 1 / math.sqrt(q_BTNH.shape[-1]) if scale is None else scale
        scores_BNTS = torch.einsum("btnh,bsnh->bnts", q_BTNH, k_BSNH) * factor
        if prepared.bias_NTS is not None:
            scores_BNTS = scores_BNTS + prepared.bias_NTS
        if prepared.allowed is None:
            return scores_BNTS.softmax(dim=-1)
        # Not minus infinity, whose softmax over a row of nothing else is not a number, and neither is its gradient.
        lowest = torch.finfo(scores_BNTS.dtype).min
        weights_BNTS = scores_BNTS.masked_fill(~prepared.allowed, lowest).softmax(dim=-1)
        return weights_BNTS.masked_fill(~prepared.allowed, 0.0)
