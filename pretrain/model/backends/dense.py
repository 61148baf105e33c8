"""The mask as one boolean tensor: for the reference, and for the kernels that take nothing better."""

import torch
from torch import Tensor

from pretrain.types import AttentionMask


def dense_mask(mask: AttentionMask, *, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Materialises a mask: True where query t may see key s; costs B x T x S bytes, T x S without documents.

    Returns:
        Bool, broadcastable to [B, N, T, S]; None if everything is visible.
    """
    allowed: Tensor | None = None
    if mask.causal:
        query_positions = torch.arange(mask.query_offset, mask.query_offset + queries, device=device)
        allowed = query_positions[:, None] >= torch.arange(keys, device=device)
    if mask.documents_BT is not None:
        key_documents = mask.documents_BT if mask.key_documents_BS is None else mask.key_documents_BS
        same = (mask.documents_BT[:, :, None] == key_documents[:, None, :])[:, None]
        allowed = same if allowed is None else same & allowed
    return allowed
