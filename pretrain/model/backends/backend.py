"""What an attention backend is: a mask prepared once a forward, then a kernel called once a layer."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

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
