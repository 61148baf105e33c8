"""One call of the kernel for each segment of the rows: packed documents and padding without a mask tensor."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretrain.model.backends.backend import DistanceBias, call_kernel, cast_inputs
from pretrain.model.backends.dense import Segment, additive_mask, blind_queries, dense_bias, dense_mask, distance_range
from pretrain.types import AttentionMask


@dataclass(frozen=True, slots=True)
class Calls:
    """How the rows, laid end to end, are cut and paired.

    Attributes:
        query_lengths: Tokens of each piece of the queries; their sum is B x T.
        key_lengths: Lengths of the key segments; their sum is B x S.
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


# Attention of a few queries at a time, computed again in the backward pass: linear memory for every
# mask and bias.
#
#     plan      segments -> tiles of at most BLOCK queries, each with only the keys that it can reach
#     forward   for each tile: its mask and bias, the kernel, its rows of the output; nothing of it is kept
#     backward  for each tile: the same again with gradients, added to those of the whole
#
# Kept for the backward pass are the queries, keys, values and the bias vector. That matters where
# torch's own kernels would fall back to the scores of all pairs (dropout on a CPU, a bias that is
# learned) or need a mask of all pairs.


BLOCK = 128

"""Queries of a tile: enough to keep a core busy, few enough that S x BLOCK scores are small."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """What is to be computed, tile by tile.

    Attributes:
        tiles: Rectangles of queries and the keys that they can reach; a query of no tile sees nothing.
        mask: What still has to be masked within a tile.
        num_queries: T.
        bias: Added to the scores.
    """

    tiles: tuple[Segment, ...]
    mask: AttentionMask
    num_queries: int
    bias: DistanceBias | None


def plan_blocks(
    segments: tuple[Segment, ...], mask: AttentionMask, num_queries: int, bias: DistanceBias | None
) -> Blocks:
    """Cuts segments into tiles, and drops the keys that `causal` and `window` put out of a tile's reach."""
    tiles = []
    for rows, queries, keys in segments:
        for start in range(queries.start, queries.stop, BLOCK):
            tile = Segment(rows, range(start, min(start + BLOCK, queries.stop)), keys)
            reached = reachable_keys(mask, tile)
            if reached:
                tiles.append(tile._replace(keys=reached))
    return Blocks(tuple(tiles), mask, num_queries, bias)


def reachable_keys(mask: AttentionMask, tile: Segment) -> range:
    """Returns the keys of a rectangle that `causal` and `window` leave to any of its queries.

    Reads a prefix on the host.
    """
    first, last = tile.queries.start + mask.query_offset, tile.queries.stop - 1 + mask.query_offset
    start, stop = tile.keys.start, tile.keys.stop
    if mask.causal:
        stop = min(stop, max(last + 1, _prefix_end(mask.prefix_BS, tile)))
    if mask.window is not None:
        start, stop = max(start, first - mask.window + 1), min(stop, last + mask.window)
    return range(start, max(start, stop))


def _prefix_end(prefix_BS: Tensor | None, tile: Segment) -> int:
    """Returns the end of the last prefix among the keys; 0 where there is none."""
    if prefix_BS is None:
        return 0
    rows, _, keys = tile
    positions = prefix_BS[rows.start : rows.stop, keys.start : keys.stop].any(dim=0).nonzero()
    return keys.start + int(positions[-1]) + 1 if len(positions) else 0


class Inputs(NamedTuple):
    """What is differentiated: all of it, or a tile's part."""

    q_BTNH: Tensor
    k_BSKH: Tensor
    v_BSKH: Tensor
    values_NR: Tensor | None

    def of_tile(self, tile: Segment, num_queries: int) -> "Inputs":
        """Returns views of what a tile reads."""
        rows, queries, keys = (slice(span.start, span.stop) for span in tile)
        values_NR = self.values_NR
        if values_NR is not None:
            values_NR = values_NR[:, distance_range(tile.queries, tile.keys, num_queries)]
        return Inputs(self.q_BTNH[rows, queries], self.k_BSKH[rows, keys], self.v_BSKH[rows, keys], values_NR)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        """Applies a function to each tensor."""
        return Inputs(*(None if x is None else change(x) for x in self))


def attend_blocks(
    q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, blocks: Blocks, *, dropout: float, scale: float | None
) -> Tensor:
    """Attends tile by tile; arguments and result are those of `AttentionBackend.attend`."""
    values_NR = None if blocks.bias is None else blocks.bias.values_NR
    # Cast here, not in each tile: the backward pass runs outside an autocast region.
    return _BlockAttention.apply(*cast_inputs(q_BTNH, k_BSKH, v_BSKH), values_NR, blocks, dropout, scale)


class _BlockAttention(torch.autograd.Function):
    """Not checkpointed slices: the gradient of a slice is as large as what it was cut from."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BTNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        values_NR: Tensor | None,
        blocks: Blocks,
        dropout: float,
        scale: float | None,
    ) -> Tensor:
        inputs = Inputs(q_BTNH, k_BSKH, v_BSKH, values_NR)
        ctx.save_for_backward(*inputs)
        ctx.blocks, ctx.dropout, ctx.scale = blocks, dropout, scale
        ctx.random_state = _random_state(q_BTNH.device) if dropout else None
        mixed_BTNH = torch.zeros_like(q_BTNH, memory_format=torch.contiguous_format)
        # With dropout, torch has to choose the kernel that it will choose in the backward pass: another one would draw
        # other weights to drop. On a CPU there is only one that has dropout.
        with torch.set_grad_enabled(bool(dropout) and q_BTNH.device.type != "cpu"):
            for tile in blocks.tiles:
                part = inputs.of_tile(tile, blocks.num_queries).map(_leaf)
                mixed = _attend_tile(tile, part, blocks.mask, dropout, scale)
                mixed_BTNH[tile.rows.start : tile.rows.stop, tile.queries.start : tile.queries.stop] = mixed.detach()
        return mixed_BTNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTNH: Tensor) -> tuple[Tensor | None, ...]:
        inputs, blocks = Inputs(*ctx.saved_tensors), ctx.blocks
        sums = inputs.map(_zeros_to_add_to)
        with _random_state_of(ctx.random_state, grad_BTNH.device):
            for tile in blocks.tiles:
                part = inputs.of_tile(tile, blocks.num_queries).map(_leaf)
                with torch.enable_grad():
                    mixed = _attend_tile(tile, part, blocks.mask, ctx.dropout, ctx.scale)
                upper = grad_BTNH[tile.rows.start : tile.rows.stop, tile.queries.start : tile.queries.stop]
                found = torch.autograd.grad(mixed, _present(part), upper)
                for total, gradient in zip(_present(sums.of_tile(tile, blocks.num_queries)), found, strict=True):
                    total += gradient
        gradients = [None if x is None else total.to(x.dtype) for x, total in zip(inputs, sums, strict=True)]
        return (*gradients, None, None, None)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _zeros_to_add_to(x: Tensor) -> Tensor:
    """In fp32 at least: the gradient of a key is a sum over tiles."""
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _present(inputs: Inputs) -> list[Tensor]:
    return [x for x in inputs if x is not None]


def _attend_tile(tile: Segment, part: Inputs, mask: AttentionMask, dropout: float, scale: float | None) -> Tensor:
    q_BTNH, k_BSKH, v_BSKH, values_NR = part
    rows, queries, keys = tile
    allowed = dense_mask(mask, queries=queries, keys=keys, device=q_BTNH.device, rows=slice(rows.start, rows.stop))
    blind = blind_queries(allowed)
    if allowed is not None and blind is not None:
        allowed = allowed | blind
    if values_NR is not None:
        # The values are those of the tile: distances count from its own first key and last query.
        own = (range(len(queries)), range(len(keys)))
        bias_NTS = dense_bias(DistanceBias(values_NR), queries=own[0], keys=own[1], num_queries=len(queries))
        allowed = additive_mask(allowed, bias_NTS, q_BTNH.dtype)
    with torch.autocast(q_BTNH.device.type, enabled=False):
        return call_kernel(q_BTNH, k_BSKH, v_BSKH, allowed=allowed, blind=blind, dropout=dropout, scale=scale)


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def _random_state_of(state: Tensor | None, device: torch.device) -> Iterator[None]:
    """Draws what was drawn after `state` was read; leaves the generator as it was."""
    if state is None:
        yield
        return
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.cuda.set_rng_state(state, device) if devices else torch.set_rng_state(state)
        yield
