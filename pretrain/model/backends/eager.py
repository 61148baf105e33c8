"""`eager`: attention as the formula says, in any dtype. The reference of the others; quadratic memory."""

import math

import torch
from torch import Tensor

from pretrain.model.backends.dense import dense_mask
from pretrain.types import AttentionMask


class EagerAttention:
    """Materialises the scores of every pair. Gradients, dropout and float64 come with it."""

    def __init__(self, device: torch.device) -> None:
        pass

    def prepare(
        self, mask: AttentionMask, *, rows: int, queries: int, keys: int, device: torch.device
    ) -> Tensor | None:
        """Returns the boolean mask, or None if everything is visible."""
        return dense_mask(mask, queries=queries, keys=keys, device=device)

    def attend(
        self, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, prepared: Tensor | None, *, dropout: float
    ) -> Tensor:
        """Attends in the dtype of its inputs, which is float64 where exactness is wanted."""
        group = q_BTNH.shape[2] // k_BSKH.shape[2]
        k_BSNH, v_BSNH = (x.repeat_interleave(group, dim=2) for x in (k_BSKH, v_BSKH))
        scores_BNTS = torch.einsum("btnh,bsnh->bnts", q_BTNH, k_BSNH) / math.sqrt(q_BTNH.shape[-1])
        if prepared is not None:
            scores_BNTS = scores_BNTS.masked_fill(~prepared, -torch.inf)
        weights_BNTS = torch.nn.functional.dropout(scores_BNTS.softmax(dim=-1), dropout)
        return torch.einsum("bnts,bsnh->btnh", weights_BNTS, v_BSNH)
