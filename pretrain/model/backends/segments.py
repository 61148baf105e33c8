"""Where documents and padding lie in the rows: runs of queries, each with the one run of keys that it can see.

    documents   0 0 0 1 1 2      three segments, queries and keys alike
    lengths     x x x x . .      one segment: all queries of the row, the keys before its padding

Attention within a segment needs no mask tensor for documents and padding, and skips the pairs that such a mask would
discard. Finding segments reads tensors on the host: on a GPU it waits for them.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.types import AttentionMask


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
