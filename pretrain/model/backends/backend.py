"""Interface of attention backends: a mask prepared once a forward, then a kernel called once a layer."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pretrain.types import AttentionMask


class DistanceBias(NamedTuple):
    """A bias of the scores that depends on head and distance only, as one vector a head: linear in length.

    Attributes:
        values_NR: fp32, differentiable, R = T + S - 1. Query t and key s of head n add
            `values_NR[n, s - t + T - 1]` to their score: distances from the last query to the first key, upwards.
            `query_offset` of the mask is counted in already.
    """

    values_NR: Tensor


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What the attention of one stack will be asked for, known when the model is built.

    Attributes:
        device: Where it runs.
        dtype: Dtype of queries, keys and values in training.
        head_width: H.
        causal: Self-attention is causal.
        window: Some layer has a window.
        bias: Scores have a `DistanceBias`.
        dropout: Attention weights have dropout in training.
        cross: Keys may come from another sequence.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    head_width: int = 64
    causal: bool = True
    window: bool = False
    bias: bool = False
    dropout: bool = False
    cross: bool = False


class AttentionBackend(Protocol):
    """Computes `softmax(scale q k^T + bias) v` under a mask.

    The constructor takes `AttentionNeeds`, and raises ConfigError with the reason where the backend cannot serve them.
    """

    def prepare(
        self,
        mask: AttentionMask,
        *,
        rows: int,
        queries: int,
        keys: int,
        device: torch.device,
        bias: DistanceBias | None = None,
    ) -> Any:
        """Turns a declared mask into what the kernel takes; `attend` gets it back as `prepared`.

        Args:
            mask: Who may attend to whom.
            rows: B.
            queries: T.
            keys: S, those in the cache included.
            device: Where the mask is needed.
            bias: Added to the scores of every layer.
        """

    def attend(
        self,
        q_BTNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        prepared: Any,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        """Attends; N is a multiple of K, and query head n reads key-value head `n // (N / K)`.

        Args:
            q_BTNH: Queries.
            k_BSKH: Keys.
            v_BSKH: Values.
            prepared: From `prepare`.
            dropout: Probability that a weight is dropped.
            scale: Factor of the scores; None: 1/sqrt(H).

        Returns:
            [B, T, N, H], in the dtype of the queries.
        """


# The one call of torch's kernel: [B, T, N, H] in and out, transposed as views.


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
