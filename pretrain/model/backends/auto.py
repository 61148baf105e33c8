"""`auto`: the best of the other backends for each mask, logged with the reason.

CPU                                   sdpa    (linear memory for every mask)
CUDA, no mask tensor needed           sdpa    (cuDNN or flash by the table, dropout too)
CUDA, decoding                        sdpa    (a mask of a few queries)
CUDA, documents or padding, 16 bits   varlen  (no mask, skips masked blocks)
CUDA, bias, window, prefix, fp32      flex    (no mask tensor)
CUDA, a cap of scores                 flex    (sdpa computes it tile by tile)
CUDA, dropout with a mask             sdpa    (the only one with dropout)

The table is `pretrain/plan/attention_table.py`; where it has `flex` for packed rows, that comes
before `varlen`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from pretrain.errors import ConfigError
from pretrain.model.backends.backend import AttentionBackend, AttentionNeeds, DistanceBias, MaskSize, needs_no_mask
from pretrain.model.backends.flex import FlexAttention
from pretrain.model.backends.sdpa import SdpaAttention
from pretrain.model.backends.varlen import VarlenAttention
from pretrain.plan.attention_table import fastest_kernel
from pretrain.types import AttentionMask

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AutoMask:
    """Name of the chosen backend, and the result of its `prepare`."""

    name: str
    prepared: Any


class AutoAttention:
    """Serves every mask that some backend serves; `prepare` chooses, mask by mask."""

    def __init__(self, needs: AttentionNeeds) -> None:
        self.sdpa = SdpaAttention(needs)
        self.needs_other = needs.sinks or needs.score_cap is not None
        self.others: dict[str, AttentionBackend] = {}
        self.refusals: list[str] = []
        builders: dict[str, Callable[[AttentionNeeds], AttentionBackend]]
        builders = {"varlen": VarlenAttention, "flex": FlexAttention}
        for name, build in builders.items():
            try:
                self.others[name] = build(needs)
            except ConfigError as refusal:
                self.refusals.append(refusal.what)

    def prepare(self, mask: AttentionMask, size: MaskSize, bias: DistanceBias | None = None) -> AutoMask:
        """Chooses a backend and prepares the mask with it."""
        why = _why_sdpa(mask, size, bias, needs_other=self.needs_other)
        refusals = list(self.refusals)
        packed = mask.documents_BT is not None or mask.key_lengths_B is not None
        fastest = fastest_kernel(packed, size.keys)
        for name in sorted(self.others, key=lambda name: name != fastest) if why is None else ():
            try:
                prepared = self.others[name].prepare(mask, size, bias)
            except ConfigError as refusal:
                refusals.append(refusal.what)
            else:
                _log_choice(f"{name} for {_describe(mask, bias)}: it needs no mask tensor")
                return AutoMask(name, prepared)
        _log_choice(f"sdpa for {_describe(mask, bias)}: {why or '; '.join(refusals)}")
        return AutoMask("sdpa", self.sdpa.prepare(mask, size, bias, cudnn=fastest == "cudnn"))

    def attend(self, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, prepared: AutoMask, **options: Any) -> Tensor:
        """Attends by the chosen backend."""
        backend = self.sdpa if prepared.name == "sdpa" else self.others[prepared.name]
        return backend.attend(q_BTNH, k_BSKH, v_BSKH, prepared.prepared, **options)


def _why_sdpa(mask: AttentionMask, size: MaskSize, bias: DistanceBias | None, *, needs_other: bool) -> str | None:
    """Returns the reason why no backend beats sdpa; None if one may."""
    if size.device.type != "cuda":
        return f"its memory is linear in length for every mask on {size.device.type}"
    if size.queries == 1 or mask.query_offset > 0:
        return "a few queries need a small mask only"
    # With sinks sdpa has its memory-efficient kernel alone, slower than flash; with a cap, tiles.
    if bias is None and not needs_other and needs_no_mask(mask, size):
        return "its kernels know this mask"
    return None


def _describe(mask: AttentionMask, bias: DistanceBias | None) -> str:
    parts = {
        "a prefix": mask.prefix_BS,
        "documents": mask.documents_BT,
        "padding": mask.key_lengths_B,
        f"a window of {mask.window}": mask.window,
        "a bias": bias,
        "a cache": mask.query_offset or None,
    }
    kind = "a causal mask" if mask.causal else "attention of all to all"
    named = [name for name, part in parts.items() if part is not None]
    return f"{kind} with {', '.join(named)}" if named else kind


@cache
def _log_choice(choice: str) -> None:
    """Logs a choice once: masks are prepared in every step."""
    log.debug(f"attention backend: {choice}")
