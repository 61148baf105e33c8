"""Cross-entropy of a linear head, without ever holding all logits.

    for each chunk of tokens:  logits = h W^T  ->  loss, softmax  ->  d loss / d h, and d loss / d W added up
    backward:                  both, times the gradient of the sum

The gradients are made in the forward pass, while a chunk's logits are at hand: the same three matrix products as with
materialised logits, none recomputed, and fewer passes over memory. Kept for the backward pass are two tensors of the
shapes of h and W. Without gradients (evaluation) only the loss is computed.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretrain.types import IGNORE_INDEX

CHUNK_LOGITS = 2**23
"""Logits held at once (32 MiB in fp32). Part of the arithmetic: another value sums in another order."""


def linear_cross_entropy(
    hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, *, vocab_size: int, bias_V: Tensor | None = None
) -> Tensor:
    """Sums `-log softmax(hidden weight^T + bias)[target]` over the targets.

    Args:
        hidden_BTD: Floating point; matrix products run in its dtype, or in autocast's.
        weight_VD: Head weight. Rows from `vocab_size` on are padding and take no part in the softmax.
        targets_BT: int64; IGNORE_INDEX where there is no loss.
        vocab_size: Real rows of the weight.
        bias_V: Head bias; None: 0.

    Returns:
        Scalar, fp32 (fp64 for fp64 inputs). The softmax is computed in that precision too.
    """
    hidden, targets = hidden_BTD.flatten(0, -2), targets_BT.flatten()
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight_VD = hidden.to(dtype), weight_VD.to(dtype)
        bias_V = None if bias_V is None else bias_V.to(dtype)
    with torch.autocast(device, enabled=False):
        # Inside a Function gradients are always off, so what they were is passed in.
        return _LinearCrossEntropy.apply(hidden, weight_VD, bias_V, targets, vocab_size, torch.is_grad_enabled())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_PD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_P: Tensor,
        vocab_size: int,
        grad_enabled: bool,
    ) -> Tensor:
        exact = torch.promote_types(hidden_PD.dtype, torch.float32)
        loss_sum = hidden_PD.new_zeros((), dtype=exact)
        for_hidden, for_weight, for_bias = (grad_enabled and needed for needed in ctx.needs_input_grad[:3])
        grad_hidden = torch.empty_like(hidden_PD) if for_hidden else None
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros_like(bias_V, dtype=exact) if bias_V is not None and for_bias else None
        size = max(1, CHUNK_LOGITS // weight_VD.shape[0])
        for start in range(0, hidden_PD.shape[0], size):
            hidden, targets = hidden_PD[start : start + size], targets_P[start : start + size]
            logits_PV = torch.nn.functional.linear(hidden, weight_VD, bias_V)
            loss, softmax_PV, total_P1 = _chunk(logits_PV, targets, vocab_size, exact)
            loss_sum += loss
            if not (for_hidden or for_weight or for_bias):
                continue
            slope_PV, scale_P1 = _slope(softmax_PV, total_P1, targets, hidden.dtype)
            if grad_hidden is not None:
                torch.mm(slope_PV, weight_VD, out=grad_hidden[start : start + size]).mul_(scale_P1)
            if for_weight:
                grad_weight = _add_product(grad_weight, slope_PV, hidden * scale_P1, exact)
            if grad_bias is not None:
                grad_bias += (slope_PV.t() @ scale_P1).squeeze(1)
        if for_hidden or for_weight or for_bias:
            kept = (grad_weight, weight_VD), (grad_bias, bias_V)
            ctx.save_for_backward(grad_hidden, *(None if g is None or p is None else g.to(p.dtype) for g, p in kept))
        return loss_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # In place: a copy of the weight's gradient would cost as much as a tenth of its product. It makes a second
        # backward pass through the same graph an error of autograd's.
        scaled = (None if kept is None else kept.mul_(grad) for kept in ctx.saved_tensors)
        return *scaled, None, None, None


def _chunk(logits_PV: Tensor, targets_P: Tensor, vocab_size: int, exact: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss of P tokens, and the softmax as numerators [P, V] and denominators [P, 1]; eats its input."""
    logits_PV = logits_PV.to(exact)
    logits_PV[:, vocab_size:] = -torch.inf
    target_logits_P1 = logits_PV.gather(1, targets_P.clamp(min=0)[:, None])
    largest_P1 = logits_PV.amax(dim=1, keepdim=True)
    softmax_PV = logits_PV.sub_(largest_P1).exp_()
    total_P1 = softmax_PV.sum(dim=1, keepdim=True)
    losses_P1 = total_P1.log() + largest_P1 - target_logits_P1
    return torch.where(targets_P[:, None] == IGNORE_INDEX, 0, losses_P1).sum(), softmax_PV, total_P1


def _slope(softmax_PV: Tensor, total_P1: Tensor, targets_P: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns d loss / d logits as a [P, V] and a [P, 1] factor, both in `dtype`; eats its first input.

    The division by the denominator, and the zero where there is no target, are left to the second: the caller applies
    it to something of width D rather than V.
    """
    softmax_PV.scatter_add_(1, targets_P.clamp(min=0)[:, None], -total_P1)
    scale_P1 = torch.where(targets_P[:, None] == IGNORE_INDEX, 0, total_P1.reciprocal())
    return softmax_PV.to(dtype), scale_P1.to(dtype)


def _add_product(sum_VD: Tensor | None, slope_PV: Tensor, hidden_PD: Tensor, exact: torch.dtype) -> Tensor:
    """Adds `slope^T hidden` to an accumulator in the precision `exact`, None being zero."""
    if sum_VD is None:
        return (slope_PV.t() @ hidden_PD).to(exact)
    if exact == hidden_PD.dtype:
        return sum_VD.addmm_(slope_PV.t(), hidden_PD)
    return sum_VD.add_(slope_PV.t() @ hidden_PD)
