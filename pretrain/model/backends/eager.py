"""`eager`: attention by its formula, in any dtype, with quadratic memory; the reference."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.model.backends.backend import AttentionNeeds, DistanceBias, MaskSize, dense_bias, dense_mask
from pretrain.types import AttentionMask


@dataclass(frozen=True, slots=True)
class EagerMask:
    """A bool mask, broadcastable to [B, N, T, S]; None: all visible. A bias, or None."""

    allowed: Tensor | None
    bias_NTS: Tensor | None


class EagerAttention:
    """Materialises the scores of all pairs: any mask, bias, dropout and dtype, with gradients."""

    def __init__(self, needs: AttentionNeeds) -> None:
        self.score_cap = needs.score_cap

    def prepare(self, mask: AttentionMask, size: MaskSize, bias: DistanceBias | None = None) -> EagerMask:
        """Materialises the mask and the bias."""
        queries, keys = range(size.queries), range(size.keys)
        allowed = dense_mask(mask, queries=queries, keys=keys, device=size.device)
        if bias is None:
            return EagerMask(allowed, None)
        bias_NTS = dense_bias(bias, queries=queries, keys=keys, num_queries=size.queries)
        return EagerMask(allowed, bias_NTS)

    def attend(
        self,
        q_BTNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        prepared: EagerMask,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Attends in the dtype of its inputs; float64 for an exact reference."""
        weights_BNTS = self.weights(q_BTNH, k_BSKH, prepared, scale=scale, sinks_N=sinks_N)
        weights_BNTS = torch.nn.functional.dropout(weights_BNTS, dropout).to(v_BSKH.dtype)
        v_BSNH = v_BSKH.repeat_interleave(q_BTNH.shape[2] // v_BSKH.shape[2], dim=2)
        return torch.einsum("bnts,bsnh->btnh", weights_BNTS, v_BSNH)

    def weights(
        self,
        q_BTNH: Tensor,
        k_BSKH: Tensor,
        prepared: EagerMask,
        *,
        scale: float | None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Returns the weights before dropout, [B, N, T, S]; 0 for a query that sees no key."""
        k_BSNH = k_BSKH.repeat_interleave(q_BTNH.shape[2] // k_BSKH.shape[2], dim=2)
        factor = 1 / math.sqrt(q_BTNH.shape[-1]) if scale is None else scale
        scores_BNTS = torch.einsum("btnh,bsnh->bnts", q_BTNH, k_BSNH) * factor
        if self.score_cap is not None:
            scores_BNTS = self.score_cap * (scores_BNTS / self.score_cap).tanh()
        if prepared.bias_NTS is not None:
            scores_BNTS = scores_BNTS + prepared.bias_NTS
        if prepared.allowed is not None:
            # Not minus infinity: the softmax of a row without keys, and its gradient, would be NaN.
            lowest = torch.finfo(scores_BNTS.dtype).min
            scores_BNTS = scores_BNTS.masked_fill(~prepared.allowed, lowest)
        if sinks_N is None:
            weights_BNTS = scores_BNTS.softmax(dim=-1)
        else:
            sinks_BNT1 = sinks_N.to(scores_BNTS.dtype)[:, None, None].expand(*scores_BNTS.shape[:-1], 1)
            weights_BNTS = torch.cat((scores_BNTS, sinks_BNT1), dim=-1).softmax(dim=-1)[..., :-1]
        return weights_BNTS if prepared.allowed is None else weights_BNTS.masked_fill(~prepared.allowed, 0.0)
