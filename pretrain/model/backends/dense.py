"""The mask and the bias of any rectangle of queries and keys as tensors: the meaning of a declaration, in one place."""

from itertools import pairwise
from typing import NamedTuple

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


# Where documents and padding lie in the rows: runs of queries, each with the one run of keys that
# it can see.
#
#     documents   0 0 0 1 1 2      three segments, queries and keys alike
#     lengths     x x x x . .      one segment: all queries of the row, the keys before its padding
#
# Attention within a segment needs no mask tensor for documents and padding, and skips the pairs
# that such a mask would discard. Finding segments reads tensors on the host: on a GPU it waits for
# them.


class Segment(NamedTuple):
    """A rectangle of queries and keys, in some rows, outside of which these queries see nothing.

    Attributes:
        rows: Rows of the batch, one or all.
        queries: Positions t; segments of a row follow each other and leave no query out.
        keys: Positions s; empty where the queries see nothing.
    """

    rows: range
    queries: range
    keys: range


def pads_queries(mask: AttentionMask, *, queries: int, keys: int) -> bool:
    """Returns whether lengths are those of the queries too: the keys are surely the queries' own sequence.

    Under a causal mask or a window they are. Else they may be a source that happens to be as long as its target.
    """
    own = queries == keys and mask.query_offset == 0 and mask.key_documents_BS is None
    return own and (mask.causal or mask.window is not None)


def find_segments(mask: AttentionMask, *, rows: int, queries: int, keys: int) -> tuple[Segment, ...] | None:
    """Cuts the rows into segments by the documents and lengths of a mask; reads them on the host.

    Returns:
        The segments, row after row, over which `causal`, `window` and the prefix still hold; one of all rows where
        they are alike, and None where the documents of a row are not runs. Queries that are padding see nothing.
    """
    lengths = [keys] * rows if mask.key_lengths_B is None else [min(n, keys) for n in mask.key_lengths_B.tolist()]
    query_runs: list[dict[int, range]] | None = [{0: range(queries)}] * rows
    key_runs: list[dict[int, range]] | None = [{0: range(keys)}] * rows
    if mask.documents_BT is not None:
        query_runs = key_runs = document_runs(mask.documents_BT)
        if mask.key_documents_BS is not None:
            key_runs = document_runs(mask.key_documents_BS)
    if query_runs is None or key_runs is None:
        return None
    pairs = list(zip(query_runs, key_runs, strict=True))
    if min(lengths) == keys and all(len(q) == len(k) == 1 and q.keys() == k.keys() for q, k in pairs):
        return (Segment(range(rows), range(queries), range(keys)),)
    pads = pads_queries(mask, queries=queries, keys=keys)
    segments = []
    for row, ((queries_of, keys_of), length) in enumerate(zip(pairs, lengths, strict=True)):
        for number, run in queries_of.items():
            seen = _clip(keys_of.get(number, range(0)), length)
            real = _clip(run, length) if pads else run
            padding = range(real.stop, run.stop)
            segments += [Segment(range(row, row + 1), real, seen)] if real else []
            segments += [Segment(range(row, row + 1), padding, range(seen.stop, seen.stop))] if padding else []
    return tuple(segments)


def document_runs(documents_BT: Tensor) -> list[dict[int, range]] | None:
    """Returns where each document of each row lies, in the order of the row; None where one comes in two runs."""
    rows, length = documents_BT.shape
    changes = documents_BT.diff(dim=1, prepend=documents_BT[:, :1] - 1).nonzero()
    numbers = documents_BT[changes[:, 0], changes[:, 1]]
    starts: list[dict[int, int]] = [{} for _ in range(rows)]
    for row, start, number in torch.cat((changes, numbers[:, None]), dim=1).tolist():
        if number in starts[row]:
            return None
        starts[row][number] = start
    return [
        dict(zip(found, (range(*span) for span in pairwise([*found.values(), length])), strict=True))
        for found in starts
    ]


def _clip(run: range, length: int) -> range:
    return range(run.start, max(run.start, min(run.stop, length)))
