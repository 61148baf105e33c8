"""`varlen`: the flash kernel for sequences laid end to end: documents and padding without a mask tensor, on a GPU.

    prepare   documents, lengths -> segments -> where each segment of queries and of keys starts (plan_varlen, pure)
    attend    [B, T, N, H] -> [B x T, N, H], one call of the kernel

Rows are not unpadded: padding is cut off into segments of its own, so nothing is gathered and shapes stay. The kernel
is torch's own (`torch.nn.attention.varlen`), or that of the flash-attn package where torch's is too old.
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

from pretrain.errors import ConfigError
from pretrain.model.backends.backend import AttentionNeeds, DistanceBias
from pretrain.model.backends.dense import Segment, find_segments
from pretrain.types import AttentionMask

USE_SDPA = "use engine.attention=sdpa"
NEEDED_OF_TORCH = {"scale", "window_size", "enable_gqa"}
MAX_HEAD_WIDTH = 256
OLDEST_CAPABILITY = (8, 0)


class Spans(NamedTuple):
    """Lengths of the segments of queries and of the segments of keys that they see, pairwise, rows laid end to end."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VarlenMask:
    """What the kernel takes.

    Attributes:
        query_starts: int32, the first token of each segment of queries, and B x T.
        key_starts: int32, the same of the keys, and B x S.
        max_queries: At least the longest segment of queries.
        max_keys: At least the longest segment of keys.
        window: Keys seen before and after a query; -1: all. Aligned at the ends of a segment's queries and keys.
    """

    query_starts: Tensor
    key_starts: Tensor
    max_queries: int
    max_keys: int
    window: tuple[int, int]


Kernel = Callable[[Tensor, Tensor, Tensor, VarlenMask, float | None], Tensor]
"""Takes [B x T, N, H], [B x S, K, H] twice, the mask and the scale; returns [B x T, N, H]."""


class VarlenAttention:
    """Serves causal masks, documents, lengths and windows in bf16 and fp16 on CUDA; no bias, dropout or prefix."""

    def __init__(self, needs: AttentionNeeds) -> None:
        _check_needs(needs)
        self.kernel, self.dtype = _load_kernel(), needs.dtype

    def prepare(
        self,
        mask: AttentionMask,
        *,
        rows: int,
        queries: int,
        keys: int,
        device: torch.device,
        bias: DistanceBias | None = None,
    ) -> VarlenMask:
        """Lays the segments end to end; waits for the device where there are documents or lengths.

        Raises:
            ConfigError: The kernel has no word for the mask: the reason is given.
        """
        if bias is not None:
            raise ConfigError("attention backend varlen adds no bias", fix=USE_SDPA)
        spans = plan_varlen(mask, rows=rows, queries=queries, keys=keys)
        reach = -1 if mask.window is None else mask.window - 1
        return VarlenMask(
            _starts(spans.queries, device),
            _starts(spans.keys, device),
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
    ) -> Tensor:
        """Attends in one call, in the 16-bit dtype that was asked for."""
        assert dropout == 0.0, "needs.dropout was refused"
        q, k, v = (x.flatten(0, 1).to(self.dtype) for x in (q_BTNH, k_BSKH, v_BSKH))
        return self.kernel(q, k, v, prepared, scale).view(q_BTNH.shape).to(q_BTNH.dtype)


def plan_varlen(mask: AttentionMask, *, rows: int, queries: int, keys: int) -> Spans:
    """Cuts rows that are laid end to end into segments, so that no query and no key is left out.

    Queries that see nothing have no keys, and keys that no query sees have no queries.

    Raises:
        ConfigError: The mask is not one of segments that follow each other, aligned as the kernel has it.
    """
    if mask.causal and mask.prefix_BS is not None:
        raise ConfigError("attention backend varlen knows no prefix", fix=USE_SDPA)
    segments = find_segments(mask, rows=rows, queries=queries, keys=keys)
    if segments is None:
        raise ConfigError("attention backend varlen needs the tokens of a document side by side", fix=USE_SDPA)
    if len(segments) == 1:
        segments = tuple(segments[0]._replace(rows=range(row, row + 1)) for row in range(rows))
    pairs: list[tuple[int, int]] = []
    done = 0
    for found in segments:
        segment = _trim(found, mask)
        if segment.keys:
            first = segment.rows.start * keys + segment.keys.start
            _check(segment, mask, in_order=first >= done)
            pairs += [(0, first - done)] if first > done else []
            done = first + len(segment.keys)
        pairs.append((len(segment.queries), len(segment.keys)))
    pairs += [(0, rows * keys - done)] if done < rows * keys else []
    return Spans(*zip(*pairs, strict=True))


def _trim(segment: Segment, mask: AttentionMask) -> Segment:
    """Drops the keys that come after the last query."""
    if not mask.causal:
        return segment
    stop = min(segment.keys.stop, segment.queries.stop + mask.query_offset)
    return segment._replace(keys=range(segment.keys.start, max(segment.keys.start, stop)))


def _check(segment: Segment, mask: AttentionMask, *, in_order: bool) -> None:
    if not in_order:
        raise ConfigError("attention backend varlen needs the sources in the order of their targets", fix=USE_SDPA)
    aligned = segment.keys.stop == segment.queries.stop + mask.query_offset
    if not aligned and (mask.causal or mask.window is not None):
        raise ConfigError(
            f"attention backend varlen needs the last of {len(segment.queries)} queries at the last of their "
            f"{len(segment.keys)} keys under a causal mask or a window",
            fix=USE_SDPA,
        )


def _starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return starts.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else starts.to(device)


def _bound(lengths: tuple[int, ...]) -> int:
    """Rounds the longest length up to a power of two, so that few lengths are compiled for.

    Not below 2: at 1 flash-attn folds grouped queries into the sequence, and fails where a segment has none
    (Dao-AILab/flash-attention#1537).
    """
    return max(2, 1 << (max(lengths) - 1).bit_length())


def _check_needs(needs: AttentionNeeds) -> None:
    if needs.device.type not in ("cuda", "meta"):
        raise ConfigError(f"attention backend varlen has no kernel for {needs.device.type}", fix=USE_SDPA)
    if needs.dtype not in (torch.bfloat16, torch.float16):
        name = str(needs.dtype).removeprefix("torch.")
        raise ConfigError(f"attention backend varlen has no kernel for {name}", fix=f"use bf16, or {USE_SDPA[4:]}")
    if needs.bias:
        raise ConfigError("attention backend varlen adds no bias", fix="use engine.attention=flex or sdpa")
    if needs.dropout:
        fix = f"set attention_dropout: 0.0 in the stack, or {USE_SDPA}"
        raise ConfigError("attention backend varlen has no dropout of attention weights", fix=fix)
    if needs.head_width % 8 or needs.head_width > MAX_HEAD_WIDTH:
        raise ConfigError(
            f"attention backend varlen needs a head width that is a multiple of 8 up to {MAX_HEAD_WIDTH}, "
            f"not {needs.head_width}",
            fix=USE_SDPA,
        )
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < OLDEST_CAPABILITY:
        raise ConfigError("attention backend varlen needs an Ampere GPU or a newer one", fix=USE_SDPA)


def _load_kernel() -> Kernel:
    """Returns torch's kernel, else that of the flash-attn package.

    Raises:
        ConfigError: torch is too old for what is asked of it, and the package is not installed.
    """
    missing = NEEDED_OF_TORCH
    if importlib.util.find_spec("torch.nn.attention.varlen") is not None:
        from torch.nn.attention.varlen import varlen_attn

        missing = NEEDED_OF_TORCH - inspect.signature(varlen_attn).parameters.keys()
    if not missing:
        return _call_torch
    if _has_flash_attn():
        return _call_flash_attn
    raise ConfigError(
        f"attention backend varlen: torch {torch.__version__} has no varlen_attn with {', '.join(sorted(missing))}",
        fix=f"install a newer torch or the package flash-attn, or {USE_SDPA}",
    )


def _has_flash_attn() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


def _call_torch(q: Tensor, k: Tensor, v: Tensor, prepared: VarlenMask, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    starts, longest = (prepared.query_starts, prepared.key_starts), (prepared.max_queries, prepared.max_keys)
    grouped = q.shape[1] != k.shape[1]
    return varlen_attn(q, k, v, *starts, *longest, scale=scale, window_size=prepared.window, enable_gqa=grouped)


def _call_flash_attn(q: Tensor, k: Tensor, v: Tensor, prepared: VarlenMask, scale: float | None) -> Tensor:
    # By name: the package is no dependency of ours.
    varlen = importlib.import_module("flash_attn").flash_attn_varlen_func
    starts, longest = (prepared.query_starts, prepared.key_starts), (prepared.max_queries, prepared.max_keys)
    exact = {"deterministic": torch.are_deterministic_algorithms_enabled()}
    return varlen(q, k, v, *starts, *longest, softmax_scale=scale, window_size=prepared.window, **exact)
