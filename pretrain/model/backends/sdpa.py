"""`sdpa`: torch's scaled_dot_product_attention, which picks a flash, memory-efficient or math kernel.

    prepare   dense causal                      -> is_causal, no mask tensor
              packed documents, CPU             -> lengths of the documents; each is one dense causal call
              anything else                     -> a boolean mask, made once a forward
    attend    [B, T, N, H] in and out, transposed as views

Running the documents of a packed row one by one keeps memory linear and skips the pairs that a mask would discard: on
a CPU never slower than a mask, and from two documents a row on faster.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pretrain.model.backends.dense import dense_mask
from pretrain.types import AttentionMask


@dataclass(frozen=True, slots=True)
class SdpaMask:
    """How the kernel is to be called: at most one of `lengths` and `allowed` is given.

    Attributes:
        is_causal: The kernel's own causal mask.
        lengths: Tokens of each document, over the rows laid end to end; their sum is B x T.
        allowed: Boolean mask, broadcastable to [B, N, T, S].
    """

    is_causal: bool = False
    lengths: tuple[int, ...] | None = None
    allowed: Tensor | None = None


class SdpaAttention:
    """Serves every mask on every device."""

    def __init__(self, device: torch.device) -> None:
        self.splits_documents = device.type == "cpu"

    def prepare(self, mask: AttentionMask, *, rows: int, queries: int, keys: int, device: torch.device) -> SdpaMask:
        """Chooses the cheapest call that computes the mask."""
        square = queries == keys and mask.query_offset == 0
        if mask.documents_BT is not None:
            own_keys = square and mask.key_documents_BS is None
            lengths = document_lengths(mask.documents_BT) if self.splits_documents and own_keys else None
            if lengths is None:
                return SdpaMask(allowed=dense_mask(mask, queries=queries, keys=keys, device=device))
            if len(lengths) > rows:
                return SdpaMask(is_causal=mask.causal, lengths=lengths)
        if square or not mask.causal:
            return SdpaMask(is_causal=mask.causal)
        if queries == 1 and mask.query_offset == keys - 1:
            return SdpaMask()
        return SdpaMask(allowed=dense_mask(mask, queries=queries, keys=keys, device=device))

    def attend(self, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, prepared: SdpaMask, *, dropout: float) -> Tensor:
        """Attends with the kernel that torch picks."""
        if prepared.lengths is None:
            return _attend(q_BTNH, k_BSKH, v_BSKH, prepared, dropout)
        # split and cat, not slices: the gradient of a slice is as large as what it was cut from.
        parts = [x.flatten(0, 1).split(prepared.lengths) for x in (q_BTNH, k_BSKH, v_BSKH)]
        mixed = [_attend(q[None], k[None], v[None], prepared, dropout)[0] for q, k, v in zip(*parts, strict=True)]
        return torch.cat(mixed).view(q_BTNH.shape)


def _attend(q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, prepared: SdpaMask, dropout: float) -> Tensor:
    mixed_BNTH = scaled_dot_product_attention(
        q_BTNH.transpose(1, 2),
        k_BSKH.transpose(1, 2),
        v_BSKH.transpose(1, 2),
        attn_mask=prepared.allowed,
        dropout_p=dropout,
        is_causal=prepared.is_causal,
        enable_gqa=q_BTNH.shape[2] != k_BSKH.shape[2],
    )
    return mixed_BNTH.transpose(1, 2)


def document_lengths(documents_BT: Tensor) -> tuple[int, ...] | None:
    """Returns the lengths of the documents of all rows, in order; None where a row's documents are not runs.

    Reads the tensor on the host.
    """
    steps = documents_BT.diff(dim=1)
    if bool((steps < 0).any()):
        return None
    rows, length = documents_BT.shape
    starts = torch.cat((torch.ones_like(documents_BT[:, :1], dtype=torch.bool), steps != 0), dim=1)
    bounds = [*starts.flatten().nonzero().flatten().tolist(), rows * length]
    return tuple(end - start for start, end in pairwise(bounds))
