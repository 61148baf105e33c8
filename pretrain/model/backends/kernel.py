"""The one call of torch's kernel: [B, T, N, H] in and out, transposed as views."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def call_kernel(
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    *,
    allowed: Tensor | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attends in one call, with the flash, cuDNN, memory-efficient or math kernel that torch picks.

    Args:
        q_BTNH: Queries.
        k_BSKH: Keys.
        v_BSKH: Values.
        allowed: Bool, or what is added to the scores; broadcastable to [B, N, T, S].
        is_causal: Query t sees keys up to t, both counted from the first that is given.
        dropout: Probability that a weight is dropped.
        scale: Factor of the scores; None: 1/sqrt(H).

    Returns:
        [B, T, N, H]; 0 on a CPU where a query may see nothing.
    """
    if allowed is not None and allowed.dtype != torch.bool:
        allowed = allowed.to(q_BTNH.dtype)
    mixed_BNTH = scaled_dot_product_attention(
        q_BTNH.transpose(1, 2),
        k_BSKH.transpose(1, 2),
        v_BSKH.transpose(1, 2),
        attn_mask=allowed,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q_BTNH.shape[2] != k_BSKH.shape[2],
    )
    return mixed_BNTH.transpose(1, 2)
