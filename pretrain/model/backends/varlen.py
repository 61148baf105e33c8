"""`varlen`: the flash kernel for concatenated sequences, on a GPU; needs no mask tensor.

    prepare   documents, lengths -> segments -> starts of the segments (plan_varlen, pure)
    attend    [B, T, N, H] -> [B x T, N, H], one call of the kernel

Rows are not unpadded: padding is a segment of its own, so nothing is gathered and shapes stay. The
kernel is torch's own (`torch.nn.attention.varlen`), or that of the flash-attn package if torch's is
too old.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.model.backends.backend import (
    NO_DROPOUT,
    AttentionNeeds,
    DistanceBias,
    MaskSize,
    Segment,
    find_segments,
    refusal,
)
from pretrain.model.backends.sinks import LseKernel, attend_with_sinks
from pretrain.types import AttentionMask

NEEDED_OF_TORCH = {"scale", "window_size"}
MAX_HEAD_WIDTH = 256
OLDEST_CAPABILITY = (8, 0)


class Spans(NamedTuple):
    """Lengths of the segments of queries, and of the keys that each sees; rows concatenated."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VarlenMask:
    """Input of the kernel: first token of each segment, int32, then B x T or B x S; longest segments.

    `window`: keys seen before and after a query, aligned at the ends of a segment; -1: all.
    """

    query_starts: Tensor
    key_starts: Tensor
    max_queries: int
    max_keys: int
    window: tuple[int, int]

    @property
    def places(self) -> tuple[Tensor, Tensor, int, int]:
        """Positional arguments of the kernel, after queries, keys and values."""
        return self.query_starts, self.key_starts, self.max_queries, self.max_keys


Kernel = Callable[[Tensor, Tensor, Tensor, VarlenMask, float | None], Tensor]
"""Takes [B x T, N, H], [B x S, K, H] twice, the mask and the scale; returns [B x T, N, H]."""


class VarlenAttention:
    """Serves masks without a prefix in bf16 and fp16 on CUDA; no bias, no dropout."""

    def __init__(self, needs: AttentionNeeds) -> None:
        _check_needs(needs)
        self.kernel = _load_kernel()
        self.lse_kernel = _torch_lse_kernel
        if needs.sinks and self.kernel is not _call_torch:
            fix = "install torch 2.13, or use engine.attention=flex or sdpa"
            raise refusal("varlen", "has no attention sinks with this kernel", fix)
        self.dtype = needs.dtype

    def prepare(self, mask: AttentionMask, size: MaskSize, bias: DistanceBias | None = None) -> VarlenMask:
        """Concatenates the segments; waits for the device where the mask has no `on_host`."""
        if bias is not None:
            raise refusal("varlen", "adds no bias")
        spans = plan_varlen(mask, size)
        reach = -1 if mask.window is None else mask.window - 1
        return VarlenMask(
            _starts(spans.queries, size.device),
            _starts(spans.keys, size.device),
            _bound(spans.queries),
            _bound(spans.keys),
            (reach, 0 if mask.causal else reach),
        )

    def attend(
        self,
        q_BTNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        prepared: VarlenMask,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Attends in one call, in the 16-bit dtype of `AttentionNeeds`."""
        assert dropout == 0.0, "the constructor refuses dropout"
        q, k, v = (x.flatten(0, 1).to(self.dtype) for x in (q_BTNH, k_BSKH, v_BSKH))
        if sinks_N is None:
            mixed = self.kernel(q, k, v, prepared, scale)
        else:
            mixed = attend_with_sinks(q, k, v, sinks_N, self.lse_kernel(prepared, scale))
        return mixed.view(q_BTNH.shape).to(q_BTNH.dtype)


def plan_varlen(mask: AttentionMask, size: MaskSize) -> Spans:
    """Cuts concatenated rows into segments that cover every query and every key.

    Queries that see nothing have no keys, and keys that no query sees have no queries.

    Raises:
        ConfigError: The segments are not consecutive, or not aligned as the kernel assumes.
    """
    if mask.causal and mask.prefix_BS is not None:
        raise refusal("varlen", "knows no prefix")
    keys = size.keys
    segments = find_segments(mask, size)
    if segments is None:
        raise refusal("varlen", "needs the tokens of a document side by side")
    if len(segments) == 1:
        segments = tuple(segments[0]._replace(rows=range(row, row + 1)) for row in range(size.rows))
    pairs: list[tuple[int, int]] = []
    done = 0
    for segment in segments:
        if mask.causal:
            # The keys after the last query.
            stop = min(segment.keys.stop, segment.queries.stop + mask.query_offset)
            start = segment.keys.start
            segment = segment._replace(keys=range(start, max(start, stop)))
        if segment.keys:
            first = segment.rows.start * keys + segment.keys.start
            _check(segment, mask, in_order=first >= done)
            if first > done:
                pairs.append((0, first - done))
            done = first + len(segment.keys)
        pairs.append((len(segment.queries), len(segment.keys)))
    if done < size.rows * keys:
        pairs.append((0, size.rows * keys - done))
    return Spans(*zip(*pairs, strict=True))


def _check(segment: Segment, mask: AttentionMask, *, in_order: bool) -> None:
    if not in_order:
        raise refusal("varlen", "needs the sources in the order of their targets")
    aligned = segment.keys.stop == segment.queries.stop + mask.query_offset
    if not aligned and (mask.causal or mask.window is not None):
        queries, keys = len(segment.queries), len(segment.keys)
        ends = f"the last of {queries} queries at the last of their {keys} keys"
        raise refusal("varlen", f"needs {ends} under a causal mask or a window")


def _starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    is_cuda = device.type == "cuda"
    return starts.pin_memory().to(device, non_blocking=True) if is_cuda else starts.to(device)


def _bound(lengths: tuple[int, ...]) -> int:
    """Returns the longest length, rounded up to a power of two and at least 2."""
    # Few bounds, few compilations. At 1, flash-attn folds grouped queries into the sequence, and
    # fails if a segment has none (Dao-AILab/flash-attention#1537).
    return max(2, 1 << (max(lengths) - 1).bit_length())


def _check_needs(needs: AttentionNeeds) -> None:
    device = needs.device.type
    if device not in ("cuda", "meta"):
        raise refusal("varlen", f"has no kernel for {device}")
    if needs.dtype not in (torch.bfloat16, torch.float16):
        name = str(needs.dtype).removeprefix("torch.")
        raise refusal("varlen", f"has no kernel for {name}", "use bf16, or engine.attention=sdpa")
    if needs.bias:
        raise refusal("varlen", "adds no bias", "use engine.attention=flex or sdpa")
    if needs.score_cap is not None:
        raise refusal("varlen", "has no cap of scores", "use engine.attention=flex or sdpa")
    if needs.dropout:
        raise refusal("varlen", "has no dropout of attention weights", NO_DROPOUT)
    if needs.head_width % 8 or needs.head_width > MAX_HEAD_WIDTH:
        width = f"a multiple of 8 up to {MAX_HEAD_WIDTH}, not {needs.head_width}"
        raise refusal("varlen", f"needs a head width that is {width}")
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < OLDEST_CAPABILITY:
        raise refusal("varlen", "needs an Ampere GPU or a newer one")


def _load_kernel() -> Kernel:
    """Returns torch's kernel, or the flash-attn package's. Raises: ConfigError: Neither."""
    missing = NEEDED_OF_TORCH
    if importlib.util.find_spec("torch.nn.attention.varlen") is not None:
        from torch.nn.attention.varlen import varlen_attn

        options = inspect.signature(varlen_attn).parameters.keys()
        missing = NEEDED_OF_TORCH - options
        if not missing:
            return _call_torch if "enable_gqa" in options else _call_older_torch
    if _has_flash_attn():
        return _call_flash_attn
    lacking = f"varlen_attn with {', '.join(sorted(missing))}"
    fix = "install a newer torch or the package flash-attn, or use engine.attention=sdpa"
    raise refusal("varlen", f"is not available: torch {torch.__version__} has no {lacking}", fix)


def _has_flash_attn() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


def _call_torch(q: Tensor, k: Tensor, v: Tensor, prepared: VarlenMask, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    grouped = q.shape[1] != k.shape[1]
    options = {"window_size": prepared.window, "enable_gqa": grouped}
    return varlen_attn(q, k, v, *prepared.places, scale=scale, **options)


def _torch_lse_kernel(prepared: VarlenMask, scale: float | None) -> LseKernel:
    """Returns torch's kernel with its log-sum-exp, and its backward pass; their L is [N, B x T]."""
    window = list(prepared.window)
    is_causal = prepared.window == (-1, 0)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        grouped = q.shape[1] != k.shape[1]
        call = torch.ops.torch_attn._varlen_attn
        results = call(q, k, v, *prepared.places, is_causal, scale, window, grouped)
        return results[0], results[1].t(), (results[2],)

    def undo(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor, lse: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        saved = (grad, q, k, v, result, lse.t().contiguous())
        call = torch.ops.torch_attn._varlen_attn_backward
        return call(*saved, *prepared.places, is_causal, state, scale, window)

    return LseKernel(run, undo)


def _call_older_torch(q: Tensor, k: Tensor, v: Tensor, prepared: VarlenMask, scale: float | None) -> Tensor:
    """Repeats keys and values for each query of their group: torch 2.11 takes as many of each."""
    from torch.nn.attention.varlen import varlen_attn

    if q.shape[1] != k.shape[1]:  # a repetition by 1 would be a copy
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return varlen_attn(q, k, v, *prepared.places, scale=scale, window_size=prepared.window)


def _call_flash_attn(q: Tensor, k: Tensor, v: Tensor, prepared: VarlenMask, scale: float | None) -> Tensor:
    # By name: the package is no dependency of ours.
    varlen = importlib.import_module("flash_attn").flash_attn_varlen_func
    exact = torch.are_deterministic_algorithms_enabled()
    options = {"window_size": prepared.window, "deterministic": exact}
    return varlen(q, k, v, *prepared.places, softmax_scale=scale, **options)
