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
    blind: Tensor | None = None,
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
        blind: Bool, broadcastable to [B, N, T, 1]: queries that see nothing although `allowed` says otherwise; not all
            kernels of a GPU answer a row of nothing with a number.
        is_causal: Query t sees keys up to t, both counted from the first that is given.
        dropout: Probability that a weight is dropped.
        scale: Factor of the scores; None: 1/sqrt(H).

    Returns:
        [B, T, N, H]; 0 for what is blind, and on a CPU wherever a query may see nothing.
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
    if blind is not None:
        mixed_BNTH = mixed_BNTH.masked_fill(blind, 0.0)
    return mixed_BNTH.transpose(1, 2)


def cast_inputs(q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gives queries, keys and values one dtype, as torch's autocast does for the kernels that it knows."""
    kind = q_BTNH.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else v_BSKH.dtype
    return q_BTNH.to(dtype), k_BSKH.to(dtype), v_BSKH.to(dtype)
