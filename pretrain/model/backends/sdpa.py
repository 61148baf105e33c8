"""`sdpa`: torch's scaled_dot_product_attention, which picks a flash, cuDNN, memory-efficient or math kernel.

    prepare   causal or full                         -> the kernel's own is_causal, or nothing
              decoding                               -> a mask of a few queries
              CPU: documents, padding                -> segments; each is one call of the kernel
              CPU: window, prefix, documents in bits -> blocks of queries, computed again in the backward pass
              CUDA: all of these                     -> a boolean mask, made once a forward
              a bias                                 -> blocks
    attend    dropout on a CPU                       -> blocks

Memory is linear in length, but for masks on CUDA that the kernel has no word for: there `flex` and `varlen` are better.
Running the documents of a packed row one by one also skips the pairs that a mask would discard: on a CPU never slower
than a mask, and from two documents a row on faster.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from pretrain.model.backends.backend import AttentionNeeds, DistanceBias, call_kernel
from pretrain.model.backends.blocks import (
    BLOCK,
    Blocks,
    Calls,
    attend_blocks,
    attend_calls,
    hides_future,
    is_plain,
    plan_blocks,
    plan_calls,
    reachable_keys,
)
from pretrain.model.backends.dense import (
    Segment,
    additive_mask,
    blind_queries,
    dense_bias,
    dense_mask,
    find_segments,
    pads_queries,
)
from pretrain.types import AttentionMask


@dataclass(frozen=True, slots=True)
class OneCall:
    """The kernel is called once, on everything.

    Attributes:
        keys: First and end of the keys that any query can reach; None: all.
        is_causal: The kernel's own causal mask.
        allowed: Boolean mask, or a bias with the mask in it, broadcastable to [B, N, T, S].
        blind: Queries that see nothing, broadcastable to [B, N, T, 1]; None: the kernel gives them 0.
    """

    keys: tuple[int, int] | None = None
    is_causal: bool = False
    allowed: Tensor | None = None
    blind: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SdpaMask:
    """How the kernel is to be called.

    Attributes:
        direct: Once, or once a segment; None: only blocks can.
        blocks: A few queries at a time; where there is a direct way too, for dropout only. None: never.
        by_calls: `attend_calls`, not to be compiled: it loops over documents, which differ from batch to batch.
        by_blocks: `attend_blocks`, likewise.
    """

    direct: OneCall | Calls | None = None
    blocks: Blocks | None = None
    by_calls: Callable[..., Tensor] = field(default_factory=lambda: _untraced(attend_calls))
    by_blocks: Callable[..., Tensor] = field(default_factory=lambda: _untraced(attend_blocks))


def _untraced(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keeps torch.compile from looking into a function; where nothing was compiled, without importing it."""
    return _disable(function) if "torch._dynamo" in sys.modules else function


@cache
def _disable(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compiler.disable(function)


class SdpaAttention:
    """Serves every mask and bias on every device."""

    def __init__(self, needs: AttentionNeeds) -> None:
        pass

    def prepare(
        self,
        mask: AttentionMask,
        *,
        rows: int,
        queries: int,
        keys: int,
        device: torch.device,
        bias: DistanceBias | None = None,
    ) -> SdpaMask:
        """Chooses the cheapest way that computes the mask; on a CPU it reads documents and lengths."""
        whole = Segment(range(rows), range(queries), range(keys))
        if queries == 1 or (mask.query_offset > 0 and queries <= BLOCK):
            return SdpaMask(_dense_call(mask, whole, device, bias))
        if device.type == "cpu":
            return _prepare_cpu(mask, whole, bias)
        return _prepare_gpu(mask, whole, device, bias)

    def attend(
        self,
        q_BTNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        prepared: SdpaMask,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        """Attends in the way that was prepared."""
        direct, blocks = prepared.direct, prepared.blocks
        if blocks is not None and (dropout or direct is None):
            return prepared.by_blocks(q_BTNH, k_BSKH, v_BSKH, blocks, dropout=dropout, scale=scale)
        if isinstance(direct, Calls):
            return prepared.by_calls(q_BTNH, k_BSKH, v_BSKH, direct, scale=scale)
        assert direct is not None
        if direct.keys is not None:
            start, end = direct.keys
            k_BSKH, v_BSKH = k_BSKH[:, start:end], v_BSKH[:, start:end]
        return call_kernel(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            allowed=direct.allowed,
            blind=direct.blind,
            is_causal=direct.is_causal,
            dropout=dropout,
            scale=scale,
        )


def _prepare_cpu(mask: AttentionMask, whole: Segment, bias: DistanceBias | None) -> SdpaMask:
    rows, queries, keys = (len(span) for span in whole)
    segments = find_segments(mask, rows=rows, queries=queries, keys=keys)
    if segments is None:
        return SdpaMask(blocks=plan_blocks((whole,), mask, queries, bias))
    inner = replace(mask, documents_BT=None, key_documents_BS=None, key_lengths_B=None)
    blocks = plan_blocks(segments, inner, queries, bias)
    if bias is not None:
        return SdpaMask(blocks=blocks)
    if segments == (whole,):
        return SdpaMask(OneCall(is_causal=hides_future(inner, whole)) if is_plain(inner, whole) else None, blocks)
    return SdpaMask(plan_calls(segments, inner, rows=rows, queries=queries, keys=keys), blocks)


def _prepare_gpu(mask: AttentionMask, whole: Segment, device: torch.device, bias: DistanceBias | None) -> SdpaMask:
    rows, queries, keys = (len(span) for span in whole)
    if bias is not None:
        return SdpaMask(blocks=plan_blocks((whole,), mask, queries, bias))
    if needs_no_mask(mask, rows=rows, queries=queries, keys=keys):
        return SdpaMask(OneCall(is_causal=hides_future(mask, whole)))
    return SdpaMask(_dense_call(mask, whole, device, None))


def needs_no_mask(mask: AttentionMask, *, rows: int, queries: int, keys: int) -> bool:
    """Returns whether one call without a mask tensor computes a mask, on any device; reads no tensor."""
    past_only = mask.causal and mask.prefix_BS is None
    # Queries that are not padding see no padding of their own sequence, if they see the past only.
    padded_alike = past_only and pads_queries(mask, queries=queries, keys=keys)
    rows_alike = mask.documents_BT is None and (mask.key_lengths_B is None or padded_alike)
    return rows_alike and is_plain(mask, Segment(range(rows), range(queries), range(keys)))


def _dense_call(mask: AttentionMask, whole: Segment, device: torch.device, bias: DistanceBias | None) -> OneCall:
    keys = reachable_keys(mask, whole) or whole.keys
    allowed = dense_mask(mask, queries=whole.queries, keys=keys, device=device)
    blind = None
    if mask.key_documents_BS is not None or mask.key_lengths_B is not None:  # Else every query sees itself.
        blind = blind_queries(allowed)
    if allowed is not None and blind is not None:
        allowed = allowed | blind
    if bias is not None:
        bias_NTS = dense_bias(bias, queries=whole.queries, keys=keys, num_queries=len(whole.queries))
        allowed = additive_mask(allowed, bias_NTS, bias_NTS.dtype)
    reached = None if keys == whole.keys else (keys.start, keys.stop)
    return OneCall(keys=reached, allowed=allowed, blind=blind)
