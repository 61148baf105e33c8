"""`flex`: FlexAttention, a kernel that torch compiles for the mask and the bias.

For GPUs only: on a CPU it has no backward pass.

    prepare   declared mask -> mask_mod -> blocks of 128 x 128 pairs (create_block_mask, compiled)
              bias by distance -> score_mod, which reads the vector and passes on its gradient
    attend    one call of the compiled kernel; blocks without a visible pair are skipped

With sinks the kernel returns its log-sum-exp too, and the result is scaled.
No T x T tensor of mask, scores or bias is made. The gradient of the bias is summed by atomic
additions (pytorch/pytorch#137452, torch 2.6 on): its last bits differ from run to run.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pretrain.model.backends.backend import NO_DROPOUT, AttentionNeeds, DistanceBias, MaskSize, cast_inputs, refusal
from pretrain.types import AttentionMask

LEAST_HEAD_WIDTH = 16
"""Smallest matrix product in triton."""

Mod = Callable[..., Tensor]
"""A function of indices, compiled into a kernel: visibility of a pair, or change of a score."""


@dataclass(frozen=True, slots=True)
class FlexMask:
    """Input of FlexAttention; without a `block_mask` everything is visible."""

    block_mask: Any
    score_mod: Mod | None
    options: dict[str, bool | int]


class FlexAttention:
    """Serves every mask and bias on CUDA, in 16 and 32 bits; no dropout."""

    def __init__(self, needs: AttentionNeeds) -> None:
        _check_needs(needs)
        self._score_cap = needs.score_cap
        self._attend: Callable[..., Tensor] | None = None

    def prepare(self, mask: AttentionMask, size: MaskSize, bias: DistanceBias | None = None) -> FlexMask:
        """Finds the blocks with visible pairs; costs one pass over the mask, on the device.

        Raises:
            ConfigError: A learned bias under deterministic algorithms.
        """
        learned = bias is not None and bias.values_NR.requires_grad
        if learned and torch.are_deterministic_algorithms_enabled():
            fix = "set engine.deterministic=false, or use engine.attention=sdpa"
            raise refusal("flex", "sums the gradient of a bias in any order", fix)
        # Not in `attend`: a cached function within a compiled block is a warning of dynamo in every run.
        self._attend = _compiled("flex_attention")
        rows, queries, keys, device = size
        mask_mod = build_mask_mod(mask, device)
        block_mask = None
        if mask_mod is not None:
            by_row = (mask.documents_BT, mask.key_lengths_B, mask.prefix_BS)
            differ = any(part is not None for part in by_row)
            lengths = {"B": rows if differ else None, "H": None, "Q_LEN": queries, "KV_LEN": keys}
            block_mask = _compiled("create_block_mask")(mask_mod, **lengths, device=device)
        score_mod = build_score_mod(bias, queries, device, self._score_cap)
        # torch's kernel for fewer than 128 queries has no configuration for some numbers of heads.
        options: dict[str, bool | int] = {"FORCE_USE_FLEX_ATTENTION": queries > 1}
        if bias is not None:
            # Reads of a bias are kept for each stage too: three exceed an H200 by torch 2.11.
            options["fwd_num_stages"] = 2
        return FlexMask(block_mask, score_mod, options)

    def attend(
        self,
        q_BTNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        prepared: FlexMask,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Attends in one kernel."""
        assert dropout == 0.0, "the constructor refuses dropout"
        assert self._attend is not None, "a mask is prepared first"
        inputs = (x.transpose(1, 2) for x in cast_inputs(q_BTNH, k_BSKH, v_BSKH))
        mixed_BNTH = self._attend(
            *inputs,
            score_mod=prepared.score_mod,
            block_mask=prepared.block_mask,
            scale=scale,
            enable_gqa=q_BTNH.shape[2] != k_BSKH.shape[2],
            kernel_options=prepared.options,
            **({} if sinks_N is None else _lse_request()),
        )
        if sinks_N is not None:
            mixed_BNTH, more = mixed_BNTH
            share_BNT = (more.lse - sinks_N.float()[:, None]).sigmoid()
            mixed_BNTH = (mixed_BNTH * share_BNT[..., None]).to(mixed_BNTH.dtype)
        return mixed_BNTH.transpose(1, 2)


def _check_needs(needs: AttentionNeeds) -> None:
    device = needs.device.type
    if device not in ("cuda", "meta"):
        raise refusal("flex", f"has no backward pass on {device}")
    if needs.dtype == torch.float64:
        raise refusal("flex", "has no kernel for float64")
    if needs.dropout:
        raise refusal("flex", "has no dropout of attention weights", NO_DROPOUT)
    if needs.head_width < LEAST_HEAD_WIDTH:
        width = f"a head width of at least {LEAST_HEAD_WIDTH}, not {needs.head_width}"
        raise refusal("flex", f"needs {width}")
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        fix = "install it, or use engine.attention=sdpa"
        raise refusal("flex", "needs the package triton", fix)


def build_mask_mod(mask: AttentionMask, device: torch.device) -> Mod | None:
    """Turns a declared mask into a predicate of (row, head, t, s); None if all pairs are visible.

    Numbers that change from call to call are tensors: each other number would be a compilation.
    """
    offset = torch.full((), mask.query_offset, device=device)  # `torch.tensor` would wait for the device
    causal, window, prefix_BS = mask.causal, mask.window, mask.prefix_BS
    documents_BT, lengths_B = mask.documents_BT, mask.key_lengths_B
    key_documents_BS = documents_BT if mask.key_documents_BS is None else mask.key_documents_BS
    if not causal and window is None and documents_BT is None and lengths_B is None:
        return None

    def is_visible(row: Tensor, head: Tensor, t: Tensor, s: Tensor) -> Tensor:
        distance = t + offset - s
        visible = distance >= 0 if causal else s >= 0
        if causal and prefix_BS is not None:
            visible = visible | prefix_BS[row, s]
        if window is not None:
            visible = visible & (distance < window) & (distance > -window)
        if documents_BT is not None:
            assert key_documents_BS is not None
            visible = visible & (documents_BT[row, t] == key_documents_BS[row, s])
        if lengths_B is not None:
            visible = visible & (s < lengths_B[row])
        return visible

    return is_visible


def build_score_mod(
    bias: DistanceBias | None, queries: int, device: torch.device, cap: float | None = None
) -> Mod | None:  # fmt: skip
    """Turns a cap and a bias into a change of the score of (row, head, t, s); None without both."""
    if bias is None and cap is None:
        return None
    values_NR = None if bias is None else bias.values_NR
    last = torch.full((), queries - 1, device=device)

    def change(score: Tensor, row: Tensor, head: Tensor, t: Tensor, s: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return score if values_NR is None else score + values_NR[head, s - t + last]

    return change


def _lse_request() -> dict[str, Any]:
    from torch.nn.attention.flex_attention import AuxRequest

    return {"return_aux": AuxRequest(lse=True)}


@cache
def _compiled(name: str) -> Callable[..., Any]:
    # At the first use only: this takes seconds.
    from torch.nn.attention import flex_attention

    return torch.compile(getattr(flex_attention, name))
