"""Interface of attention backends, and the meaning of a declared mask.

prepare     once a forward: a declared mask -> the input of the kernel
attend      once a layer: the kernel
dense_mask  a mask as a tensor over any rectangle of queries and keys; dense_bias: a bias
find_segments  rectangles of documents and padding, outside of which nothing is visible
"""

import functools
import operator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pretrain.errors import ConfigError
from pretrain.model.backends.sinks import attend_with_sinks, sdpa_kernel_of
from pretrain.types import AttentionMask

WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

NO_DROPOUT = "set attention_dropout: 0.0 in the stack, or use engine.attention=sdpa"


def refusal(backend: str, reason: str, fix: str = "use engine.attention=sdpa") -> ConfigError:
    """Returns the error of a backend that does not support a stack or a mask."""
    return ConfigError(f"attention backend {backend} {reason}", fix=fix)


class DistanceBias(NamedTuple):
    """A bias of the scores by head and distance, as one vector a head: linear in length.

    Attributes:
        values_NR: fp32, differentiable, R = T + S - 1. Query t and key s of head n add
            `values_NR[n, s - t + T - 1]` to their score: distances from the last query to the
            first key, upwards. `query_offset` of the mask is included.
    """

    values_NR: Tensor

    def at(self, position_1: Tensor) -> "DistanceBias":
        """Returns the bias of one query at that position, from the bias of a query at the last key's."""
        num_keys = self.values_NR.shape[1]
        moved_S = torch.arange(num_keys - 1, 2 * num_keys - 1, device=position_1.device) - position_1
        # Keys after the query have no bias: they are hidden.
        return DistanceBias(self.values_NR.index_select(1, moved_S.clamp(max=num_keys - 1)))


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """Requirements of a stack's attention, known when the model is built.

    `dtype` is that of queries, keys and values in training, `bias` a `DistanceBias` of the scores,
    `dropout` one of the weights in training, `sinks` a sink of each head, `score_cap` the soft cap of
    scaled scores before the bias is added.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    head_width: int = 64
    bias: bool = False
    dropout: bool = False
    sinks: bool = False
    score_cap: float | None = None


class MaskSize(NamedTuple):
    """B, T and S of a mask, S with the keys in the cache, and the device of its layers."""

    rows: int
    queries: int
    keys: int
    device: torch.device


class AttentionBackend(Protocol):
    """Computes `softmax(cap(scale q k^T) + bias) v` under a mask.

    The constructor takes `AttentionNeeds`; it raises ConfigError with the reason if the backend
    does not support them.
    """

    def prepare(self, mask: AttentionMask, size: MaskSize, bias: DistanceBias | None = None) -> Any:
        """Turns a declared mask into the input of the kernel, passed to `attend` as `prepared`.

        The bias is added to the scores of every layer.
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
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Returns [B, T, N, H] in the dtype of the queries.

        N is a multiple of K, and query head n reads key-value head `n // (N / K)`. `dropout` is the
        probability that a weight is dropped, `scale` a factor of the scores; None: 1/sqrt(H).
        `sinks_N` are scores of a further key of each head, without a value; None: no such key.
        """


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
    sinks_N: Tensor | None = None,
    cudnn: bool = False,
) -> Tensor:
    """Calls torch's kernel: flash, memory-efficient or math, by torch's choice.

    `cudnn` adds cuDNN, which torch prefers on a GPU: the fastest, after a second or so for the plan
    of each shape, forward and backward (pytorch/pytorch#155958). For a few shapes that repeat only.

    `allowed` is a bool mask or an addend of the scores, broadcastable to [B, N, T, S]. `blind`,
    bool [B, N, T, 1], are queries that see nothing, contrary to `allowed`: some GPU kernels return
    NaN for a row without keys. The result is 0 there, and on a CPU for every query without keys.
    """
    if allowed is not None and allowed.dtype != torch.bool:
        allowed = allowed.to(q_BTNH.dtype)
    sinks = None if sinks_N is None else sinks_N[:, None]
    shape, group = q_BTNH.shape, q_BTNH.shape[2] // k_BSKH.shape[2]
    if group > 1 and allowed is not None and shape[1] == 1:
        # The only query: its heads of a group as queries of one head, which every kernel takes with a mask.
        q_BTNH, allowed, sinks = _heads_as_queries(q_BTNH, allowed, sinks, group)
        group = 1
    if group > 1 and not _takes_groups(q_BTNH, allowed, sinks):
        k_BSKH, v_BSKH = (x.repeat_interleave(group, dim=2) for x in (k_BSKH, v_BSKH))
        group = 1
    q_BNTH, k_BKSH, v_BKSH = (x.transpose(1, 2) for x in (q_BTNH, k_BSKH, v_BSKH))
    if sinks is not None:
        kernel = sdpa_kernel_of(q_BTNH.device, allowed, is_causal=is_causal, scale=scale)
        q_BNTH, k_BKSH, v_BKSH = cast_inputs(q_BNTH, k_BKSH, v_BKSH)
        mixed_BNTH = attend_with_sinks(q_BNTH, k_BKSH, v_BKSH, sinks, kernel)
    else:
        with _kernels(q_BTNH.device, cudnn=cudnn):
            mixed_BNTH = scaled_dot_product_attention(
                q_BNTH,
                k_BKSH,
                v_BKSH,
                attn_mask=allowed,
                dropout_p=dropout,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=group > 1,
            )
    if blind is not None:
        mixed_BNTH = mixed_BNTH.masked_fill(blind, 0.0)
    if mixed_BNTH.shape[2] != shape[1]:
        return mixed_BNTH.reshape(shape)
    return mixed_BNTH.transpose(1, 2)


def _kernels(device: torch.device, *, cudnn: bool) -> AbstractContextManager[None]:
    return nullcontext() if cudnn or device.type == "cpu" else sdpa_kernel(WITHOUT_CUDNN)


def _heads_as_queries(
    q_B1NH: Tensor, allowed: Tensor, sinks_N1: Tensor | None, group: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the heads of each group as queries of one head, with their mask and sinks."""
    q_BGKH = q_B1NH.unflatten(2, (-1, group))[:, 0].transpose(1, 2)
    if allowed.ndim > 2 and allowed.shape[-3] > 1:
        allowed = allowed.unflatten(-3, (-1, group)).squeeze(-2)
    return q_BGKH, allowed, None if sinks_N1 is None else sinks_N1.view(-1, group)


def _takes_groups(q_BTNH: Tensor, allowed: Tensor | None, sinks: Tensor | None = None) -> bool:
    """Returns False where a GPU has the memory-efficient kernel alone: for groups it would be the math one, T x S."""
    kind = q_BTNH.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q_BTNH.dtype
    return kind == "cpu" or (dtype.itemsize == 2 and allowed is None and sinks is None)  # flash takes no mask


def cast_inputs(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Casts queries, keys and values to one dtype, as autocast does for the kernels it knows."""
    kind = inputs[0].device.type
    autocasts = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocasts else inputs[-1].dtype
    return tuple(x.to(dtype) for x in inputs)


ALL_ROWS = slice(None)


def dense_mask(
    mask: AttentionMask, *, queries: range, keys: range, device: torch.device, rows: slice = ALL_ROWS
) -> Tensor | None:
    """Materialises a mask over a rectangle: True where query t sees key s; one byte a pair.

    A prefix lifts `causal` only: window, documents and lengths apply to its keys too. `queries`
    are positions t without `query_offset`. The result is broadcastable to [B, N, T, S] of the
    rectangle; None if all of it is visible.
    """
    first, last = query_bounds(mask, queries, keys)
    hides = mask.causal and keys.stop - 1 > first
    cuts = mask.window is not None and max(keys.stop - 1 - first, last - keys.start) >= mask.window
    if not hides and not cuts and mask.documents_BT is None and mask.key_lengths_B is None:
        return None
    terms = []
    keys_S = torch.arange(keys.start, keys.stop, device=device)
    columns = slice(keys.start, keys.stop)
    at_T = mask.position_1
    if at_T is None:
        at_T = torch.arange(first, last + 1, device=device)
    distances_TS = keys_S - at_T[:, None]
    if hides:
        seen = distances_TS <= 0
        if mask.prefix_BS is not None:
            seen = seen | mask.prefix_BS[rows, None, None, columns]
        terms.append(seen)
    if cuts and mask.window is not None:
        terms.append(distances_TS.abs() < mask.window)
    if mask.documents_BT is not None:
        terms.append(_same_document(mask.documents_BT[rows], mask.key_documents_BS, queries, columns, rows))
    if mask.key_lengths_B is not None:
        terms.append(keys_S < mask.key_lengths_B[rows, None, None, None])
    return functools.reduce(operator.and_, terms)


def _same_document(
    documents_BT: Tensor, key_documents_BS: Tensor | None, queries: range, columns: slice, rows: slice
) -> Tensor:
    keys_BS = documents_BT if key_documents_BS is None else key_documents_BS[rows]
    return documents_BT[:, None, queries.start : queries.stop, None] == keys_BS[:, None, None, columns]


def query_bounds(mask: AttentionMask, queries: range, keys: range) -> tuple[int, int]:
    """Returns the positions of the first and last query among the keys; bounds, where the host does not know them."""
    if mask.position_1 is not None:
        return 0, keys.stop - 1
    return queries.start + mask.query_offset, queries.stop - 1 + mask.query_offset


def blind_queries(allowed: Tensor | None) -> Tensor | None:
    """Returns the queries without a visible key, [B, N, T, 1]; None on a CPU: kernels return 0."""
    if allowed is None or allowed.device.type == "cpu":
        return None
    return ~allowed.any(dim=-1, keepdim=True)


def dense_bias(bias: DistanceBias, *, queries: range, keys: range, num_queries: int) -> Tensor:
    """Returns the bias over a rectangle, [N, T, S], differentiable: [n, t, s] belongs to the distance s - t.

    `num_queries` is T of the whole: distance 0 is at index T - 1 of the bias.
    """
    needed_NR = bias.values_NR[:, distance_range(queries, keys, num_queries)]
    # Row i of unfold starts at distance i of the rectangle: its i-th query from the last to its
    # first key.
    return needed_NR.unfold(1, len(keys), 1).flip(1)


def distance_range(queries: range, keys: range, num_queries: int) -> slice:
    """Returns the entries of a `DistanceBias` in a rectangle: its T + S - 1 distances, upwards."""
    first = keys.start - (queries.stop - 1) + num_queries - 1
    return slice(first, first + len(queries) + len(keys) - 1)


def additive_mask(allowed: Tensor | None, bias_NTS: Tensor, dtype: torch.dtype) -> Tensor:
    """Joins a mask and a bias into the addend of the scores."""
    bias_NTS = bias_NTS.to(dtype)
    return bias_NTS if allowed is None else bias_NTS.masked_fill(~allowed, -torch.inf)


# Segments: runs of queries, each with the one run of keys that they can see.
#
#     documents   0 0 0 1 1 2      three segments, queries and keys alike
#     lengths     x x x x . .      one segment: all queries of the row, the keys before its padding
#
# Within a segment, documents and padding need no mask tensor, and the pairs that such a mask would
# discard are not computed. Finding segments reads tensors on the host: on a GPU it synchronises.


class Segment(NamedTuple):
    """A rectangle of queries and keys in one row or all; its queries see no key outside of it.

    The segments of a row are consecutive and cover all queries. No keys: the queries see nothing.
    """

    rows: range
    queries: range
    keys: range


def whole_of(size: MaskSize) -> Segment:
    """Returns all rows, queries and keys of a mask."""
    return Segment(range(size.rows), range(size.queries), range(size.keys))


def is_plain(mask: AttentionMask, segment: Segment) -> bool:
    """Returns whether `is_causal`, or no mask at all, equals the mask of a segment."""
    first = segment.queries.start + mask.query_offset
    last = segment.queries.stop - 1 + mask.query_offset
    farthest = last - segment.keys.start
    if not mask.causal:
        farthest = max(farthest, segment.keys.stop - 1 - first)
    if mask.window is not None and farthest >= mask.window:
        return False
    starts_alike = mask.prefix_BS is None and first == segment.keys.start
    return not hides_future(mask, segment) or starts_alike


def hides_future(mask: AttentionMask, segment: Segment) -> bool:
    """Returns whether `causal` hides any key of a segment."""
    return mask.causal and segment.keys.stop - 1 > segment.queries.start + mask.query_offset


def reachable_keys(mask: AttentionMask, tile: Segment) -> range:
    """Returns the keys of a rectangle in reach of any query by `causal`, `window` and the prefix.

    Reads a prefix on the host.
    """
    rows, queries, keys = tile
    first, last = query_bounds(mask, queries, keys)
    start = keys.start
    stop = keys.stop
    if mask.causal:
        prefix_end = 0
        if mask.prefix_BS is not None:
            prefix = mask.prefix_BS[rows.start : rows.stop, start:stop].any(dim=0).nonzero()
            prefix_end = start + int(prefix[-1]) + 1 if len(prefix) else 0
        stop = min(stop, max(last + 1, prefix_end))
    if mask.window is not None:
        start = max(start, first - mask.window + 1)
        stop = min(stop, last + mask.window)
    return range(start, max(start, stop))


def pads_queries(mask: AttentionMask, size: MaskSize) -> bool:
    """Returns whether lengths apply to the queries too, because the keys are their own sequence.

    They are under a causal mask or a window; else they may be a source as long as its target.
    """
    is_self = size.queries == size.keys and mask.query_offset == 0 and mask.key_documents_BS is None
    return is_self and (mask.causal or mask.window is not None)


def needs_no_mask(mask: AttentionMask, size: MaskSize) -> bool:
    """Returns whether one call without a mask tensor computes a mask, on any device."""
    past_only = mask.causal and mask.prefix_BS is None
    # Queries that are not padding see no padding of their own sequence if they see the past only.
    padded_alike = past_only and pads_queries(mask, size)
    rows_alike = mask.documents_BT is None and (mask.key_lengths_B is None or padded_alike)
    return rows_alike and is_plain(mask, whole_of(size))


def find_segments(mask: AttentionMask, size: MaskSize) -> tuple[Segment, ...] | None:
    """Cuts the rows into segments by the documents and lengths of a mask, read on the host.

    Returns:
        The segments, row after row, over which `causal`, `window` and the prefix still apply; a
        single one of all rows if they are alike; None if a document of a row is not one run.
        Queries that are padding see nothing.
    """
    rows, queries, keys, _ = size
    lengths = [keys] * rows
    there = mask.on_host or mask
    if there.key_lengths_B is not None:
        lengths = [min(length, keys) for length in there.key_lengths_B.tolist()]
    query_runs: list[dict[int, range]] | None = [{0: range(queries)}] * rows
    key_runs: list[dict[int, range]] | None = [{0: range(keys)}] * rows
    if there.documents_BT is not None:
        query_runs = key_runs = document_runs(there.documents_BT)
        if there.key_documents_BS is not None:
            key_runs = document_runs(there.key_documents_BS)
    if query_runs is None or key_runs is None:
        return None
    pairs = list(zip(query_runs, key_runs, strict=True))
    single = all(len(q) == len(k) == 1 and q.keys() == k.keys() for q, k in pairs)
    if single and min(lengths) == keys:
        return (whole_of(size),)
    pads = pads_queries(mask, size)
    segments: list[Segment] = []
    for number, ((queries_of, keys_of), length) in enumerate(zip(pairs, lengths, strict=True)):
        row = range(number, number + 1)
        for document, run in queries_of.items():
            seen = _clip(keys_of.get(document, range(0)), length)
            segments += _cut_padding(row, run, seen, length if pads else run.stop)
    return tuple(segments)


def _cut_padding(row: range, run: range, seen: range, length: int) -> list[Segment]:
    """Returns a run of queries without its padding, and the padding, which sees nothing."""
    if run.stop <= length:
        return [Segment(row, run, seen)]
    real = _clip(run, length)
    padding = Segment(row, range(real.stop, run.stop), range(seen.stop, seen.stop))
    return [Segment(row, real, seen), padding] if real else [padding]


def document_runs(documents_BT: Tensor) -> list[dict[int, range]] | None:
    """Returns the run of each document of each row, in order; None if a document has two runs."""
    rows, length = documents_BT.shape
    changes = documents_BT.diff(dim=1, prepend=documents_BT[:, :1] - 1).nonzero()
    numbers = documents_BT[changes[:, 0], changes[:, 1]]
    starts: list[dict[int, int]] = [{} for _ in range(rows)]
    for row, start, number in torch.cat((changes, numbers[:, None]), dim=1).tolist():
        if number in starts[row]:
            return None
        starts[row][number] = start
    runs = []
    for firsts in starts:
        spans = pairwise([*firsts.values(), length])
        runs.append({number: range(*span) for number, span in zip(firsts, spans, strict=True)})
    return runs


def _clip(run: range, length: int) -> range:
    return run if run.stop <= length else range(run.start, max(run.start, length))
