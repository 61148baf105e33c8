"""One call of the kernel for each segment of the rows: packed documents and padding without a mask tensor."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pretrain.model.backends.kernel import call_kernel
from pretrain.model.backends.segments import Segment
from pretrain.types import AttentionMask


@dataclass(frozen=True, slots=True)
class Calls:
    """How the rows, laid end to end, are cut and paired.

    Attributes:
        query_lengths: Tokens of each piece of the queries; their sum is B x T.
        key_lengths: The same of the keys; their sum is B x S.
        key_pieces: For each piece of queries the number of its piece of keys; None: it sees nothing.
        is_causal: Whether the kernel's causal mask is on, for each piece of queries.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    key_pieces: tuple[int | None, ...]
    is_causal: tuple[bool, ...]


def is_plain(mask: AttentionMask, segment: Segment) -> bool:
    """Returns whether the kernel needs no mask tensor for a segment: it sees all, or what `is_causal` says."""
    first, last = segment.queries.start + mask.query_offset, segment.queries.stop - 1 + mask.query_offset
    farthest = (
        last - segment.keys.start if mask.causal else max(last - segment.keys.start, segment.keys.stop - 1 - first)
    )
    if mask.window is not None and farthest >= mask.window:
        return False
    return not hides_future(mask, segment) or (mask.prefix_BS is None and first == segment.keys.start)


def hides_future(mask: AttentionMask, segment: Segment) -> bool:
    """Returns whether `causal` hides any key of a segment."""
    return mask.causal and segment.keys.stop - 1 > segment.queries.start + mask.query_offset


def plan_calls(
    segments: tuple[Segment, ...], mask: AttentionMask, *, rows: int, queries: int, keys: int
) -> Calls | None:
    """Plans a call a segment; None where one of them needs a mask tensor."""
    if not all(is_plain(mask, segment) for segment in segments if segment.keys):
        return None
    spans = [
        (segment.rows.start * keys + segment.keys.start, segment.rows.start * keys + segment.keys.stop)
        for segment in segments
    ]
    cuts = sorted({0, rows * keys}.union(*spans))
    piece_at = {start: number for number, start in enumerate(cuts[:-1])}
    return Calls(
        query_lengths=tuple(len(segment.queries) for segment in segments),
        key_lengths=tuple(end - start for start, end in pairwise(cuts)),
        key_pieces=tuple(piece_at[start] if end > start else None for start, end in spans),
        is_causal=tuple(hides_future(mask, segment) for segment in segments),
    )


def attend_calls(q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, calls: Calls, *, scale: float | None) -> Tensor:
    """Attends segment by segment; arguments and result are those of `AttentionBackend.attend`."""
    # split and cat, not slices: the gradient of a slice is as large as what it was cut from.
    q_pieces = q_BTNH.flatten(0, 1).split(calls.query_lengths)
    k_pieces, v_pieces = (x.flatten(0, 1).split(calls.key_lengths) for x in (k_BSKH, v_BSKH))
    mixed = []
    for q, piece, is_causal in zip(q_pieces, calls.key_pieces, calls.is_causal, strict=True):
        if piece is None:
            mixed.append(torch.zeros_like(q))
        else:
            k, v = k_pieces[piece], v_pieces[piece]
            mixed.append(call_kernel(q[None], k[None], v[None], is_causal=is_causal, scale=scale)[0])
    return torch.cat(mixed).view(q_BTNH.shape)
