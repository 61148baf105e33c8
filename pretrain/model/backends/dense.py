"""The mask and the bias of any rectangle of queries and keys as tensors: the meaning of a declaration, in one place."""

import torch
from torch import Tensor

from pretrain.model.backends.backend import DistanceBias
from pretrain.types import AttentionMask

ALL_ROWS = slice(None)


def dense_mask(
    mask: AttentionMask, *, queries: range, keys: range, device: torch.device, rows: slice = ALL_ROWS
) -> Tensor | None:
    """Materialises a mask: True where query t may see key s; costs a byte a pair, of each row where rows differ.

    A prefix lifts `causal` and nothing else: the window, documents and lengths hold for its keys too.

    Args:
        mask: Who may attend to whom.
        queries: Positions t of the rectangle, without `query_offset`.
        keys: Positions s of the rectangle.
        device: Where the mask is needed.
        rows: Rows of the batch.

    Returns:
        Bool, broadcastable to [B, N, T, S] of the rectangle; None if all of it is visible.
    """
    terms = []
    first, last = queries.start + mask.query_offset, queries.stop - 1 + mask.query_offset
    distances_TS = (
        torch.arange(keys.start, keys.stop, device=device) - torch.arange(first, last + 1, device=device)[:, None]
    )
    if mask.causal and keys.stop - 1 > first:
        seen = distances_TS <= 0
        if mask.prefix_BS is not None:
            seen = seen | mask.prefix_BS[rows, None, None, keys.start : keys.stop]
        terms.append(seen)
    if mask.window is not None and max(keys.stop - 1 - first, last - keys.start) >= mask.window:
        terms.append(distances_TS.abs() < mask.window)
    if mask.documents_BT is not None:
        key_documents_BS = mask.documents_BT if mask.key_documents_BS is None else mask.key_documents_BS
        of_queries = mask.documents_BT[rows, None, queries.start : queries.stop, None]
        terms.append(of_queries == key_documents_BS[rows, None, None, keys.start : keys.stop])
    if mask.key_lengths_B is not None:
        positions = torch.arange(keys.start, keys.stop, device=device)
        terms.append(positions < mask.key_lengths_B[rows, None, None, None])
    allowed = None
    for term in terms:
        allowed = term if allowed is None else allowed & term
    return allowed


def blind_queries(allowed: Tensor | None) -> Tensor | None:
    """Returns True for queries that a mask lets see nothing, [B, N, T, 1]; None on a CPU, whose kernels give them 0."""
    if allowed is None or allowed.device.type == "cpu":
        return None
    return ~allowed.any(dim=-1, keepdim=True)


def dense_bias(bias: DistanceBias, *, queries: range, keys: range, num_queries: int) -> Tensor:
    """Lays a bias by distance out over a rectangle, differentiably: entry [n, t, s] is that of distance s - t.

    Args:
        bias: A value for each distance.
        queries: Positions t of the rectangle.
        keys: Positions s of the rectangle.
        num_queries: T of the whole: distance 0 lies at index T - 1 of the bias.

    Returns:
        [N, T, S] of the rectangle, in the dtype of the bias.
    """
    needed_NR = bias.values_NR[:, distance_range(queries, keys, num_queries)]
    # Row i of unfold starts at distance i of the rectangle: that of its i-th query from the last to its first key.
    return needed_NR.unfold(1, len(keys), 1).flip(1)


def distance_range(queries: range, keys: range, num_queries: int) -> slice:
    """Returns which entries of a `DistanceBias` a rectangle reads: its T + S - 1 distances, upwards."""
    first = keys.start - (queries.stop - 1) + num_queries - 1
    return slice(first, first + len(queries) + len(keys) - 1)


def additive_mask(allowed: Tensor | None, bias_NTS: Tensor, dtype: torch.dtype) -> Tensor:
    """Joins a mask and a bias: what `scaled_dot_product_attention` adds to the scores."""
    bias_NTS = bias_NTS.to(dtype)
    return bias_NTS if allowed is None else bias_NTS.masked_fill(~allowed, -torch.inf)
