"""`auto`: the best of the other backends for each mask, and a line in the log that says which and why.

CPU                                   sdpa    (linear memory, whatever the mask)
CUDA, no mask tensor needed           sdpa    (flash or cuDNN, dropout too)
CUDA, decoding                        sdpa    (a mask of a few queries)
CUDA, documents or padding, 16 bits   varlen  (no mask, skips masked blocks)
CUDA, bias, window, prefix, fp32      flex    (no mask tensor)
CUDA, dropout with a mask             sdpa    (nothing else has dropout)
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pretrain.errors import ConfigError
from pretrain.model.backends.backend import AttentionBackend, AttentionNeeds, DistanceBias
from pretrain.model.backends.flex import FlexAttention
from pretrain.model.backends.sdpa import SdpaAttention, needs_no_mask
from pretrain.model.backends.varlen import VarlenAttention
from pretrain.types import AttentionMask

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AutoMask:
    """What the chosen backend prepared.

    Attributes:
        name: The backend.
        prepared: Result of its `prepare`.
    """

    name: str
    prepared: Any


class AutoAttention:
    """Serves what any backend serves; chooses in `prepare`, mask by mask."""

    def __init__(self, needs: AttentionNeeds) -> None:
        self.sdpa = SdpaAttention(needs)
        self.others: dict[str, AttentionBackend] = {}
        self.refusals: list[str] = []
        builders: dict[str, Callable[[AttentionNeeds], AttentionBackend]]
        builders = {"varlen": VarlenAttention, "flex": FlexAttention}
        for name, build in builders.items():
            try:
                self.others[name] = build(needs)
            except ConfigError as refusal:
                self.refusals.append(refusal.what)

    def prepare(
        self,
        mask: AttentionMask,
        *,
        rows: int,
        queries: int,
        keys: int,
        device: torch.device,
        bias: DistanceBias | None = None,
    ) -> AutoMask:
        """Chooses a backend and lets it prepare the mask."""
        size = {"rows": rows, "queries": queries, "keys": keys}
        name, why, prepared = self._choose(mask, size, device, bias)
        _say(f"attention backend: {name} for {_describe(mask, bias)}: {why}")
        return AutoMask(name, prepared)

    def attend(
        self,
        q_BTNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        prepared: AutoMask,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        """Attends as the chosen backend does."""
        backend = self.sdpa if prepared.name == "sdpa" else self.others[prepared.name]
        return backend.attend(q_BTNH, k_BSKH, v_BSKH, prepared.prepared, dropout=dropout, scale=scale)

    def _choose(
        self, mask: AttentionMask, size: dict[str, int], device: torch.device, bias: DistanceBias | None
    ) -> tuple[str, str, Any]:
        """Returns the name of a backend, the reason for it, and what it prepared."""
        why = _why_sdpa(mask, size, device, bias)
        refusals = list(self.refusals)
        for name, backend in self.others.items() if why is None else ():
            try:
                return name, "it needs no mask tensor", backend.prepare(mask, **size, device=device, bias=bias)
            except ConfigError as refusal:
                refusals.append(refusal.what)
        return "sdpa", why or "; ".join(refusals), self.sdpa.prepare(mask, **size, device=device, bias=bias)


def _why_sdpa(mask: AttentionMask, size: dict[str, int], device: torch.device, bias: DistanceBias | None) -> str | None:
    """Says why nothing beats sdpa; None where others may."""
    if device.type != "cuda":
        return f"its memory is linear in length for every mask on {device.type}"
    if size["queries"] == 1 or mask.query_offset > 0:
        return "a few queries need a small mask only"
    if bias is None and needs_no_mask(mask, **size):
        return "its kernels know this mask"
    return None


def _describe(mask: AttentionMask, bias: DistanceBias | None) -> str:
    parts = {
        "a prefix": mask.prefix_BS,
        "documents": mask.documents_BT,
        "padding": mask.key_lengths_B,
        f"a window of {mask.window}": mask.window,
        "a bias": bias,
    }
    kind = "a causal mask" if mask.causal else "attention of all to all"
    named = [kind, *(name for name, part in parts.items() if part is not None)]
    if mask.query_offset > 0:
        named.append("a cache")
    return " with ".join([named[0], ", ".join(named[1:])]) if named[1:] else named[0]


@cache
def _say(line: str) -> None:
    """Logs a line once: masks are prepared in every step."""
    log.info(line)
