"""Where documents and padding lie in the rows: runs of queries, each with the one run of keys that it can see.

    documents   0 0 0 1 1 2      three segments, queries and keys alike
    lengths     x x x x . .      one segment: all queries of the row, the keys before its padding

Attention within a segment needs no mask tensor for documents and padding, and skips the pairs that such a mask would
discard. Finding segments reads tensors on the host, so it is for the CPU.
"""

from typing import NamedTuple

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


def find_segments(mask: AttentionMask, *, rows: int, queries: int, keys: int) -> tuple[Segment, ...] | None:
    """Cuts the rows into segments by the documents and lengths of a mask; reads them on the host.

    Under `causal` over one's own keys, queries from a row's length on are padding as well; their segment has no keys.

    Returns:
        The segments, row after row, over which `causal`, `window` and the prefix still hold; None where the documents
        of a row are not runs.
    """
    lengths = [keys] * rows if mask.key_lengths_B is None else [min(n, keys) for n in mask.key_lengths_B.tolist()]
    if mask.documents_BT is None:
        if min(lengths) == keys:
            return (Segment(range(rows), range(queries), range(keys)),)
        pads_queries = mask.causal and queries == keys and mask.query_offset == 0
        seen = [min(queries, n) if pads_queries else queries for n in lengths]
        segments = []
        for row, (end, length) in enumerate(zip(seen, lengths, strict=True)):
            segments.append(Segment(range(row, row + 1), range(end), range(length)))
            if end < queries:
                segments.append(Segment(range(row, row + 1), range(end, queries), range(length, length)))
        return tuple(segments)
    query_runs = document_runs(mask.documents_BT)
    key_runs = query_runs if mask.key_documents_BS is None else document_runs(mask.key_documents_BS)
    if query_runs is None or key_runs is None:
        return None
    if all(len(runs) == 1 for runs in query_runs) and min(lengths) == keys and query_runs == key_runs:
        return (Segment(range(rows), range(queries), range(keys)),)
    return tuple(
        Segment(range(row, row + 1), run, _clip(key_runs[row].get(number, range(0)), lengths[row]))
        for row in range(rows)
        for number, run in query_runs[row].items()
    )


def document_runs(documents_BT: Tensor) -> list[dict[int, range]] | None:
    """Returns where each document of each row lies, in the order of the row; None where one comes in two runs."""
    rows, length = documents_BT.shape
    found: list[dict[int, range]] = [{} for _ in range(rows)]
    changes = documents_BT.diff(dim=1).nonzero().tolist()
    starts = [[0] for _ in range(rows)]
    for row, before in changes:
        starts[row].append(before + 1)
    numbers = documents_BT.tolist()
    for row in range(rows):
        for start, end in zip(starts[row], [*starts[row][1:], length], strict=True):
            number = numbers[row][start]
            if number in found[row]:
                return None
            found[row][number] = range(start, end)
    return found


def _clip(run: range, length: int) -> range:
    return range(run.start, max(run.start, min(run.stop, length)))
