"""`flex`: FlexAttention, a kernel that torch compiles for the mask: documents, windows, prefixes, learned biases.

For GPUs only: on a CPU it has no backward pass.

    prepare   declared mask -> mask_mod -> the blocks of 128 x 128 pairs that it leaves   (create_block_mask, compiled)
              bias by distance -> score_mod, which reads the vector and gives it its gradient
    attend    one call of the compiled kernel; blocks that see nothing are skipped

No T x T tensor is made, of mask, scores or bias. The gradient of the bias is summed by atomic additions
(pytorch/pytorch#137452, torch 2.6 on), so its last bits differ from run to run.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pretrain.errors import ConfigError
from pretrain.model.backends.backend import AttentionNeeds, DistanceBias, cast_inputs
from pretrain.types import AttentionMask

USE_SDPA = "use engine.attention=sdpa"
LEAST_HEAD_WIDTH = 16
"""Of a matrix product in triton."""

Mod = Callable[..., Tensor]
"""A function of indices that torch compiles into a kernel: what may be seen, or what becomes of a score."""


@dataclass(frozen=True, slots=True)
class FlexMask:
    """What FlexAttention takes.

    Attributes:
        block_mask: Blocks of pairs that are not masked, and the mask within them; None: everything is visible.
        score_mod: Adds the bias to a score; None: there is none.
    """

    block_mask: Any
    score_mod: Mod | None


class FlexAttention:
    """Serves every mask and bias on CUDA, in 16 and 32 bits; no dropout."""

    def __init__(self, needs: AttentionNeeds) -> None:
        _check_needs(needs)

    def prepare(
        self,
        mask: AttentionMask,
        *,
        rows: int,
        queries: int,
        keys: int,
        device: torch.device,
        bias: DistanceBias | None = None,
    ) -> FlexMask:
        """Finds the blocks of pairs that the mask leaves; costs a pass over the mask, on the device.

        Raises:
            ConfigError: A learned bias is wanted, and deterministic algorithms too.
        """
        if bias is not None and bias.values_NR.requires_grad and torch.are_deterministic_algorithms_enabled():
            raise ConfigError(
                "attention backend flex sums the gradient of a bias in any order",
                fix="set engine.deterministic=false, or use engine.attention=sdpa",
            )
        mask_mod = build_mask_mod(mask, device)
        block_mask = None
        if mask_mod is not None:
            differ = any(x is not None for x in (mask.documents_BT, mask.key_lengths_B, mask.prefix_BS))
            size = {"B": rows if differ else None, "H": None, "Q_LEN": queries, "KV_LEN": keys}
            block_mask = _compiled_block_mask()(mask_mod, **size, device=device)
        return FlexMask(block_mask, None if bias is None else build_score_mod(bias, queries, device))

    def attend(
        self,
        q_BTNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        prepared: FlexMask,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        """Attends in one kernel."""
        assert dropout == 0.0, "needs.dropout was refused"
        q_BNTH, k_BKSH, v_BKSH = (x.transpose(1, 2) for x in cast_inputs(q_BTNH, k_BSKH, v_BSKH))
        mixed_BNTH = _compiled_kernel()(
            q_BNTH,
            k_BKSH,
            v_BKSH,
            score_mod=prepared.score_mod,
            block_mask=prepared.block_mask,
            scale=scale,
            enable_gqa=q_BTNH.shape[2] != k_BSKH.shape[2],
        )
        return mixed_BNTH.transpose(1, 2)


def _check_needs(needs: AttentionNeeds) -> None:
    if needs.device.type not in ("cuda", "meta"):
        raise ConfigError(f"attention backend flex has no backward pass on {needs.device.type}", fix=USE_SDPA)
    if needs.dtype == torch.float64:
        raise ConfigError("attention backend flex has no kernel for float64", fix=USE_SDPA)
    if needs.dropout:
        raise ConfigError(
            "attention backend flex has no dropout of attention weights",
            fix=f"set attention_dropout: 0.0 in the stack, or {USE_SDPA}",
        )
    if needs.head_width < LEAST_HEAD_WIDTH:
        raise ConfigError(
            f"attention backend flex needs a head width of at least {LEAST_HEAD_WIDTH}, not {needs.head_width}",
            fix=USE_SDPA,
        )
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        raise ConfigError("attention backend flex needs the package triton", fix=f"install it, or {USE_SDPA}")


def build_mask_mod(mask: AttentionMask, device: torch.device) -> Mod | None:
    """Turns a declared mask into a function of (row, head, t, s) that says whether the pair is visible; None: all are.

    Numbers that change from call to call are tensors: a kernel is compiled for every other number.
    """
    offset = torch.tensor(mask.query_offset, device=device)
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


def build_score_mod(bias: DistanceBias, queries: int, device: torch.device) -> Mod:
    """Turns a bias into a function that adds it to the score of (row, head, t, s)."""
    values_NR, last = bias.values_NR, torch.tensor(queries - 1, device=device)

    def add_bias(score: Tensor, row: Tensor, head: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return score + values_NR[head, s - t + last]

    return add_bias


# Imported and compiled at the first use: both take seconds, which a run with another backend does not have to wait.
@cache
def _compiled_kernel() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@cache
def _compiled_block_mask() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask)
