"""`sdpa`: torch's scaled_dot_product_attention: a flash, cuDNN, memory-efficient or math kernel.

    prepare   causal or full                      -> is_causal of the kernel, or no mask
              decoding                            -> a mask of a few queries
              CPU: documents, padding             -> segments, one call each
              CPU: neighbouring short documents   -> one call with a mask; all rows, if they are short
              CPU: window, prefix, cut documents  -> tiles of queries, recomputed in the backward
              CUDA: all of these                  -> a boolean mask, made once a forward
              a bias, a cap of scores             -> tiles
    attend    dropout on a CPU                    -> tiles

Memory is linear in length, except for masks on CUDA that need a tensor: `flex` and `varlen` serve
those better. Calling the kernel for each document of a packed row skips the pairs that a mask would
discard: on a CPU it is faster than a mask, unless documents are as short as sentences.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretrain.model.backends.backend import (
    AttentionNeeds,
    DistanceBias,
    MaskSize,
    Segment,
    additive_mask,
    blind_queries,
    call_kernel,
    cast_inputs,
    dense_bias,
    dense_mask,
    distance_range,
    find_segments,
    hides_future,
    is_plain,
    needs_no_mask,
    reachable_keys,
    refusal,
    whole_of,
)
from pretrain.model.backends.eager import EagerAttention, EagerMask
from pretrain.model.lazy_compiler import is_compiler_loaded
from pretrain.types import AttentionMask

BLOCK = 128
"""Queries of a tile: enough to keep a core busy, and S x BLOCK scores stay small."""

CALL_PAIRS = 5000
"""Pairs of a query and a key that cost a CPU as much as beginning a call: 0.17 ms, 4 heads."""

Part = tuple[Segment, AttentionMask]
"""A segment and the mask that applies within it."""

CUDNN_SHAPES = 4
"""Shapes of calls of the cuDNN kernel, which are planned for a second each: those of full training
and evaluation rows. Shapes beyond come from rows that are cropped to their tokens."""


@dataclass(frozen=True, slots=True)
class OneCall:
    """A single call of the kernel; `keys`: first and end of those in reach of any query.

    `cudnn`: the kernel may be cuDNN's.
    """

    keys: tuple[int, int] | None = None
    is_causal: bool = False
    allowed: Tensor | None = None
    blind: Tensor | None = None
    cudnn: bool = False


@dataclass(frozen=True, slots=True)
class Calls:
    """One call for each segment: rows are concatenated, and cut into pieces of queries and keys.

    Lengths sum to B x T and B x S. Queries of piece i see the keys of piece `key_pieces[i]`, all or
    those of a mask of their own, or nothing.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    key_pieces: tuple[int | None, ...]
    is_causal: tuple[bool, ...]
    allowed: tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class Blocks:
    """One call for each tile of queries and the keys in their reach, with a mask and a bias.

    A query in no tile sees nothing. `masks` has one for each tile. `capped`: the formula, for the
    kernel has no cap of scores.
    """

    tiles: tuple[Segment, ...]
    masks: tuple[AttentionMask, ...]
    num_queries: int
    bias: DistanceBias | None
    capped: EagerAttention | None = None

    def is_whole(self, q_BTNH: Tensor, k_BSKH: Tensor) -> bool:
        """Returns whether one tile has all rows, queries and keys."""
        (rows, queries), keys = q_BTNH.shape[:2], k_BSKH.shape[1]
        return self.tiles == (Segment(range(rows), range(queries), range(keys)),)


@dataclass(frozen=True, slots=True)
class SdpaMask:
    """Plan of the calls.

    Attributes:
        direct: One call, or one a segment; None: the mask needs tiles.
        blocks: Tiles; with a direct plan, for dropout only. None: not needed.
        run: `_attend_parts`, exempt from torch.compile.
    """

    direct: OneCall | Calls | None
    blocks: Blocks | None
    run: Callable[..., Tensor]


class SdpaAttention:
    """Serves every mask and bias on every device; sinks without dropout and bias."""

    def __init__(self, needs: AttentionNeeds) -> None:
        if needs.sinks and needs.score_cap is None and (needs.dropout or needs.bias):
            problem = "has no dropout of attention weights" if needs.dropout else "adds no bias"
            fix = "leave one of them out, or use engine.attention=eager"
            raise refusal("sdpa", f"{problem} beside attention sinks", fix)
        self._capped = None if needs.score_cap is None else EagerAttention(needs)
        self._cudnn_shapes: set[tuple[int, int, int]] = set()

    def prepare(
        self,
        mask: AttentionMask,
        size: MaskSize,
        bias: DistanceBias | None = None,
        *,
        cudnn: bool = True,
    ) -> SdpaMask:
        """Plans the cheapest calls for a mask; on a CPU it reads documents and lengths.

        `cudnn`: on a GPU the kernel of rows without a mask may be cuDNN's.
        """
        whole = whole_of(size)
        if self._capped is not None:
            return _planned(blocks=plan_blocks([(whole, mask)], size.queries, bias, self._capped))
        if size.queries == 1 or (mask.query_offset > 0 and size.queries <= BLOCK):
            return _planned(_dense_call(mask, whole, size.device, bias))
        if size.device.type == "cpu":
            return _prepare_cpu(mask, size, bias)
        return self._prepare_gpu(mask, size, bias, cudnn)

    def attend(
        self,
        q_BTNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        prepared: SdpaMask,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Attends by the prepared plan."""
        direct = prepared.direct
        if prepared.blocks is not None and (dropout or direct is None):
            return prepared.run(q_BTNH, k_BSKH, v_BSKH, prepared.blocks, dropout, scale, sinks_N)
        if isinstance(direct, Calls):
            return prepared.run(q_BTNH, k_BSKH, v_BSKH, direct, 0.0, scale, sinks_N)
        assert direct is not None
        if direct.keys is not None:
            k_BSKH, v_BSKH = (x[:, slice(*direct.keys)] for x in (k_BSKH, v_BSKH))
        masks: dict[str, Any] = {"allowed": direct.allowed, "blind": direct.blind}
        options: dict[str, Any] = {"dropout": dropout, "scale": scale, "sinks_N": sinks_N}
        options |= {"is_causal": direct.is_causal, "cudnn": direct.cudnn}
        return call_kernel(q_BTNH, k_BSKH, v_BSKH, **masks, **options)

    def _prepare_gpu(
        self, mask: AttentionMask, size: MaskSize, bias: DistanceBias | None, cudnn: bool = True
    ) -> SdpaMask:
        whole = whole_of(size)
        if bias is not None:
            return _planned(blocks=plan_blocks([(whole, mask)], size.queries, bias))
        if not needs_no_mask(mask, size):
            return _planned(_dense_call(mask, whole, size.device, None))
        shape = (size.rows, size.queries, size.keys)
        if cudnn and len(self._cudnn_shapes) < CUDNN_SHAPES:
            self._cudnn_shapes.add(shape)
        return _planned(OneCall(is_causal=hides_future(mask, whole), cudnn=shape in self._cudnn_shapes))


def _planned(direct: OneCall | Calls | None = None, blocks: Blocks | None = None) -> SdpaMask:
    """Returns a plan whose loops over documents and tiles torch.compile leaves out of its graph."""
    # They differ from batch to batch. Importing the compiler takes seconds: only if it is in use.
    return SdpaMask(direct, blocks, _uncompiled() if is_compiler_loaded() else _attend_parts)


@cache
def _uncompiled() -> Callable[..., Tensor]:
    return torch.compiler.disable(_attend_parts)


def _prepare_cpu(mask: AttentionMask, size: MaskSize, bias: DistanceBias | None) -> SdpaMask:
    rows, queries, keys, _ = size
    whole = whole_of(size)
    segments = find_segments(mask, size)
    if segments is None:
        return _planned(blocks=plan_blocks([(whole, mask)], queries, bias))
    inner = replace(mask, documents_BT=None, key_documents_BS=None, key_lengths_B=None)
    parts = join_short(segments, mask, inner)
    blocks = plan_blocks(parts, queries, bias)
    apart = [segment for segment, applied in parts if segment.keys and applied is inner]
    if bias is not None or not all(is_plain(inner, segment) for segment in apart):
        return _planned(blocks=blocks)
    if segments == (whole,):
        return _planned(OneCall(is_causal=hides_future(inner, whole)), blocks)
    by_calls = sum(CALL_PAIRS + len(part.queries) * len(part.keys) for part, _ in parts)
    if rows * queries * keys < by_calls:
        return _planned(_dense_call(mask, whole, size.device, None), blocks)
    return _planned(plan_calls(parts, inner, size), blocks)


def join_short(segments: tuple[Segment, ...], mask: AttentionMask, inner: AttentionMask) -> list[Part]:
    """Joins neighbouring documents of a row while the pairs of all cost no more than beginning a call.

    Args:
        segments: One for each document, to which `inner` applies.
        mask: The declared mask, which applies to joined ones.
        inner: The declared mask without documents and lengths.
    """
    at_most = math.isqrt(CALL_PAIRS)
    parts: list[Part] = []
    for segment in segments:
        if parts and segment.keys:
            (row, queries, keys), _ = parts[-1]
            adjacent = row.start == segment.rows.start and keys and keys.stop == segment.keys.start
            length = max(segment.queries.stop - queries.start, segment.keys.stop - keys.start)
            if adjacent and length <= at_most:
                queries, keys = range(queries.start, segment.queries.stop), range(keys.start, segment.keys.stop)
                parts[-1] = (Segment(row, queries, keys), mask)
                continue
        parts.append((segment, inner))
    return parts


def _dense_call(mask: AttentionMask, whole: Segment, device: torch.device, bias: DistanceBias | None) -> OneCall:
    keys = reachable_keys(mask, whole) or whole.keys
    allowed = dense_mask(mask, queries=whole.queries, keys=keys, device=device)
    blind = None
    # Without these every query sees itself.
    if mask.key_documents_BS is not None or mask.key_lengths_B is not None:
        blind = blind_queries(allowed)
    if allowed is not None and blind is not None:
        allowed = allowed | blind
    if bias is not None:
        bias_NTS = dense_bias(bias, queries=whole.queries, keys=keys, num_queries=len(whole.queries))
        allowed = additive_mask(allowed, bias_NTS, bias_NTS.dtype)
    reached = None if keys == whole.keys else (keys.start, keys.stop)
    return OneCall(keys=reached, allowed=allowed, blind=blind)


def plan_calls(parts: list[Part], inner: AttentionMask, size: MaskSize) -> Calls:
    """Plans one call for each part; those to which `inner` applies need no mask tensor."""
    segments = [segment for segment, _ in parts]
    spans = []
    for segment in segments:
        first = segment.rows.start * size.keys
        spans.append((first + segment.keys.start, first + segment.keys.stop))
    cuts = sorted({0, size.rows * size.keys}.union(*spans))
    piece_at = {start: number for number, start in enumerate(cuts[:-1])}
    return Calls(
        query_lengths=tuple(len(segment.queries) for segment in segments),
        key_lengths=tuple(end - start for start, end in pairwise(cuts)),
        key_pieces=tuple(piece_at[start] if end > start else None for start, end in spans),
        is_causal=tuple(mask is inner and hides_future(inner, segment) for segment, mask in parts),
        allowed=tuple(None if mask is inner else _mask_of(segment, mask, size.device) for segment, mask in parts),
    )


def _mask_of(tile: Segment, mask: AttentionMask, device: torch.device) -> Tensor | None:
    rows = slice(tile.rows.start, tile.rows.stop)
    return dense_mask(mask, queries=tile.queries, keys=tile.keys, device=device, rows=rows)


def plan_blocks(
    parts: Iterable[Part], num_queries: int, bias: DistanceBias | None, capped: EagerAttention | None = None
) -> Blocks:
    """Cuts segments into tiles, without the keys out of reach by `causal` and `window`."""
    tiles = []
    masks = []
    for (rows, queries, keys), mask in parts:
        for start in range(queries.start, queries.stop, BLOCK):
            tile = Segment(rows, range(start, min(start + BLOCK, queries.stop)), keys)
            if reached := reachable_keys(mask, tile):
                tiles.append(tile._replace(keys=reached))
                masks.append(mask)
    return Blocks(tuple(tiles), tuple(masks), num_queries, bias, capped)


def _attend_parts(
    q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, plan: Calls | Blocks,
    dropout: float, scale: float | None, sinks_N: Tensor | None,
) -> Tensor:  # fmt: skip
    if isinstance(plan, Blocks):
        values_NR = None if plan.bias is None else plan.bias.values_NR
        # Cast here, not in each tile: the backward pass runs outside an autocast region.
        inputs = cast_inputs(q_BTNH, k_BSKH, v_BSKH)
        return _BlockAttention.apply(*inputs, values_NR, sinks_N, plan, dropout, scale)
    # split and cat, not slices: the gradient of a slice has the size of the whole.
    q_pieces = q_BTNH.flatten(0, 1).split(plan.query_lengths)
    k_pieces, v_pieces = (x.flatten(0, 1).split(plan.key_lengths) for x in (k_BSKH, v_BSKH))
    mixed = []
    calls = zip(q_pieces, plan.key_pieces, plan.is_causal, plan.allowed, strict=True)
    for q, piece, is_causal, allowed in calls:
        if piece is None:
            mixed.append(torch.zeros_like(q))
        else:
            inputs = (q[None], k_pieces[piece][None], v_pieces[piece][None])
            result = call_kernel(*inputs, allowed=allowed, is_causal=is_causal, scale=scale, sinks_N=sinks_N)
            mixed.append(result[0])
    return torch.cat(mixed).view(q_BTNH.shape)


class Inputs(NamedTuple):
    """Differentiable inputs, whole or of one tile."""

    q_BTNH: Tensor
    k_BSKH: Tensor
    v_BSKH: Tensor
    values_NR: Tensor | None
    sinks_N: Tensor | None

    def of_tile(self, tile: Segment, num_queries: int) -> "Inputs":
        """Returns views of the inputs that a tile reads."""
        rows, queries, keys = (slice(span.start, span.stop) for span in tile)
        values_NR = self.values_NR
        if values_NR is not None:
            values_NR = values_NR[:, distance_range(tile.queries, tile.keys, num_queries)]
        k_BSKH = self.k_BSKH[rows, keys]
        return Inputs(self.q_BTNH[rows, queries], k_BSKH, self.v_BSKH[rows, keys], values_NR, self.sinks_N)

    def leaves(self) -> "Inputs":
        """Returns the same values as leaves of a graph of their own."""
        return Inputs(*(None if x is None else x.detach().requires_grad_() for x in self))


class _BlockAttention(torch.autograd.Function):
    """Attention tile by tile, recomputed in the backward pass, in linear memory for every mask."""

    # Saved are the queries, keys, values and the bias vector. torch's own kernels would fall back to
    # the scores of all pairs (dropout on a CPU, a learned bias), or need a mask of all pairs. Slices
    # under activation checkpointing would not do: the gradient of a slice has the size of the whole.

    @staticmethod
    def forward(
        ctx: Any, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, values_NR: Tensor | None, sinks_N: Tensor | None,
        blocks: Blocks, dropout: float, scale: float | None,
    ) -> Tensor:  # fmt: skip
        inputs = Inputs(q_BTNH, k_BSKH, v_BSKH, values_NR, sinks_N)
        ctx.save_for_backward(*inputs)
        ctx.blocks, ctx.dropout, ctx.scale = blocks, dropout, scale
        device = q_BTNH.device
        ctx.random_state = None
        if dropout:
            on_gpu = device.type == "cuda"
            ctx.random_state = torch.cuda.get_rng_state(device) if on_gpu else torch.get_rng_state()
        # With dropout, torch must pick the kernel of the backward pass: another kernel would drop
        # other weights. On a CPU only one kernel has dropout.
        with torch.set_grad_enabled(bool(dropout) and device.type != "cpu"):
            if blocks.is_whole(q_BTNH, k_BSKH):
                mixed = _attend_tile(blocks.tiles[0], blocks.masks[0], inputs.leaves(), blocks, dropout, scale)
                return mixed.detach().contiguous()
            mixed_BTNH = torch.zeros_like(q_BTNH, memory_format=torch.contiguous_format)
            for tile, mask in zip(blocks.tiles, blocks.masks, strict=True):
                part = inputs.of_tile(tile, blocks.num_queries).leaves()
                mixed = _attend_tile(tile, mask, part, blocks, dropout, scale)
                _rows_of(mixed_BTNH, tile)[:] = mixed.detach()
        return mixed_BTNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTNH: Tensor) -> tuple[Tensor | None, ...]:
        inputs = Inputs(*ctx.saved_tensors)
        blocks = ctx.blocks
        options = blocks, ctx.dropout, ctx.scale
        with _random_state_of(ctx.random_state, grad_BTNH.device):
            if blocks.is_whole(inputs.q_BTNH, inputs.k_BSKH):
                return (
                    *_differentiate(blocks.tiles[0], blocks.masks[0], inputs, grad_BTNH, *options),
                    None,
                    None,
                    None,
                )
            sums = Inputs(*(None if x is None else _zeros_to_add_to(x) for x in inputs))
            for tile, mask in zip(blocks.tiles, blocks.masks, strict=True):
                part = inputs.of_tile(tile, blocks.num_queries)
                grads = _differentiate(tile, mask, part, _rows_of(grad_BTNH, tile), *options)
                for total, gradient in zip(sums.of_tile(tile, blocks.num_queries), grads, strict=True):
                    if total is not None:
                        total += gradient
        gradients = [None if x is None else total.to(x.dtype) for x, total in zip(inputs, sums, strict=True)]
        return (*gradients, None, None, None)


def _differentiate(
    tile: Segment, mask: AttentionMask, part: Inputs, grad_BTNH: Tensor,
    blocks: Blocks, dropout: float, scale: float | None,
) -> list[Tensor | None]:  # fmt: skip
    """Returns the gradients of the inputs of a tile, which is computed again."""
    leaves = part.leaves()
    with torch.enable_grad():
        mixed = _attend_tile(tile, mask, leaves, blocks, dropout, scale)
    grads = iter(torch.autograd.grad(mixed, [x for x in leaves if x is not None], grad_BTNH))
    return [None if x is None else next(grads) for x in leaves]


def _rows_of(x: Tensor, tile: Segment) -> Tensor:
    return x[tile.rows.start : tile.rows.stop, tile.queries.start : tile.queries.stop]


def _zeros_to_add_to(x: Tensor) -> Tensor:
    # fp32 or fp64: the gradient of a key is a sum over tiles.
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _attend_tile(
    tile: Segment, mask: AttentionMask, part: Inputs, plan: Blocks, dropout: float, scale: float | None
) -> Tensor:
    q_BTNH, k_BSKH, v_BSKH, values_NR, sinks_N = part
    allowed = _mask_of(tile, mask, q_BTNH.device)
    bias_NTS = None
    if values_NR is not None:
        # Values of the tile: distances count from its own first key and last query.
        spans = {"queries": range(len(tile.queries)), "keys": range(len(tile.keys))}
        bias_NTS = dense_bias(DistanceBias(values_NR), **spans, num_queries=len(tile.queries))
    options: dict[str, Any] = {"dropout": dropout, "scale": scale, "sinks_N": sinks_N}
    with torch.autocast(q_BTNH.device.type, enabled=False):
        if plan.capped is not None:
            return plan.capped.attend(q_BTNH, k_BSKH, v_BSKH, EagerMask(allowed, bias_NTS), **options)
        blind = blind_queries(allowed)
        if allowed is not None and blind is not None:
            allowed = allowed | blind
        if bias_NTS is not None:
            allowed = additive_mask(allowed, bias_NTS, q_BTNH.dtype)
        return call_kernel(q_BTNH, k_BSKH, v_BSKH, allowed=allowed, blind=blind, **options)


@contextmanager
def _random_state_of(state: Tensor | None, device: torch.device) -> Iterator[None]:
    """Replays the random numbers drawn after `state` was read; restores the generator."""
    if state is None:
        yield
        return
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.cuda.set_rng_state(state, device) if devices else torch.set_rng_state(state)
        yield
