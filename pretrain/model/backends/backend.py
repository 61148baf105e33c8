"""What an attention backend is: a mask prepared once a forward, then a kernel called once a layer."""

from typing import Any, Protocol

import torch
from torch import Tensor

from pretrain.types import AttentionMask


class AttentionBackend(Protocol):
    """Computes `softmax(q k^T / sqrt(H)) v` under a mask.

    The constructor takes the device, and raises ConfigError with the reason where the backend cannot serve it.
    """

    def prepare(self, mask: AttentionMask, *, rows: int, queries: int, keys: int, device: torch.device) -> Any:
        """Turns a declared mask into what the kernel takes; `attend` gets it back as `prepared`.

        Args:
            mask: Who may attend to whom.
            rows: B.
            queries: T.
            keys: S, those in the cache included.
            device: Where the mask is needed.
        """

    def attend(self, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, prepared: Any, *, dropout: float) -> Tensor:
        """Attends; N is a multiple of K, and query head n reads key-value head `n // (N / K)`. Returns [B, T, N, H]."""
