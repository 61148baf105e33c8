"""Cross-entropy of a linear head, without ever holding all logits.

    for each chunk of tokens:  logits = h W^T  ->  losses, their slope  ->  d loss / d h, and d loss / d W added up
    backward:                  both, times the gradient of the sum

The gradients are made in the forward pass, while a chunk's logits are at hand: the same three matrix products as with
materialised logits, none recomputed, and fewer passes over memory. Kept for the backward pass are two tensors of the
shapes of h and W: D / P of the logits' bytes where W has their precision, half of that in bf16. Making them in the
backward pass instead would take a product more and not lower the peak: the head's backward pass is the first, and needs
room for the gradient of W while all else is still held. Nor would W be whole there (ZeRO stage 3). Without gradients
(evaluation) only the losses are computed.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretrain.objective.cross_entropy import CrossEntropy, score_chunk, slope_of_chunk

CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**26}
"""Logits held at once, by device: 64 and 256 MiB in fp32. Part of the arithmetic: another value sums in another order.

A GPU wants more: what it adds to the gradient of W for each chunk is limited by memory, and its launches by number.
"""


class TokenLoss(NamedTuple):
    """Sums over the targets of a batch.

    Attributes:
        loss_sum: Scalar, fp32 (fp64 for fp64 inputs): what is minimised; differentiable, once.
        nll_sum: Scalar, the same dtype, detached: -log p(target), without smoothing and z-loss.
        num_correct: Scalar int64, detached: targets with the largest score; of several largest the first counts.
        nll_P: What `nll_sum` is the sum of, detached: one value a token, 0 where it has no target.
    """

    loss_sum: Tensor
    nll_sum: Tensor
    num_correct: Tensor
    nll_P: Tensor


def linear_cross_entropy(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    vocab_size: int,
    bias_V: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
) -> TokenLoss:
    """Sums the cross-entropy of `softmax(hidden weight^T + bias)` over the targets.

    Args:
        hidden_BTD: Floating point, or [P, D]; matrix products run in its dtype, or in autocast's.
        weight_VD: Head weight. Rows from `vocab_size` on are padding and take no part in the softmax.
        targets_BT: int64, or [P]; IGNORE_INDEX where there is no loss.
        vocab_size: Real rows of the weight.
        bias_V: Head bias; None: 0.
        label_smoothing: Share of the target's probability that is spread evenly over the real vocabulary.
        z_loss: Coefficient of the squared log of the softmax's denominator.
        soft_cap: Bound that logits approach, `cap tanh(logits / cap)`; None: they are not bounded.

    Returns:
        The sums, the same with gradients on and off. The softmax is computed in the precision of the sums.
    """
    hidden, targets = hidden_BTD.flatten(0, -2), targets_BT.flatten()
    form = CrossEntropy(vocab_size, label_smoothing, z_loss, soft_cap)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight_VD = hidden.to(dtype), weight_VD.to(dtype)
        bias_V = None if bias_V is None else bias_V.to(dtype)
    with torch.autocast(device, enabled=False):
        # Inside a Function gradients are always off, so what they were is passed in.
        return TokenLoss(*_Sums.apply(hidden, weight_VD, bias_V, targets, form, torch.is_grad_enabled()))


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_PD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_P: Tensor,
        form: CrossEntropy,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        exact = torch.promote_types(hidden_PD.dtype, torch.float32)
        loss_sum, nll_sum = hidden_PD.new_zeros((), dtype=exact), hidden_PD.new_zeros((), dtype=exact)
        num_correct, nll_P = targets_P.new_zeros(()), hidden_PD.new_empty(len(targets_P), dtype=exact)
        for_hidden, for_weight, for_bias = (grad_enabled and needed for needed in ctx.needs_input_grad[:3])
        for_slope = for_hidden or for_weight or for_bias
        grad_hidden = torch.empty_like(hidden_PD) if for_hidden else None
        grad_weight = torch.zeros_like(weight_VD, dtype=exact) if for_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=exact) if bias_V is not None and for_bias else None
        size = _chunk_tokens(weight_VD)
        for start in range(0, hidden_PD.shape[0], size):
            hidden, targets_P1 = hidden_PD[start : start + size], targets_P[start : start + size, None]
            logits_PV = torch.nn.functional.linear(hidden, weight_VD, bias_V).to(exact)
            chunk = score_chunk(logits_PV, targets_P1, form, for_slope)
            loss_sum += chunk.loss
            nll_sum += chunk.nll
            nll_P[start : start + size] = chunk.nll_P1[:, 0]
            num_correct += chunk.num_correct
            if not for_slope:
                continue
            slope_PV = slope_of_chunk(chunk, targets_P1, form, hidden.dtype)
            if grad_hidden is not None:
                torch.mm(slope_PV, weight_VD, out=grad_hidden[start : start + size])
            if grad_weight is not None:
                _add_product(grad_weight, slope_PV, hidden)
            if grad_bias is not None:
                grad_bias += slope_PV.sum(dim=0, dtype=exact)
        if for_slope:
            kept = (grad_weight, weight_VD), (grad_bias, bias_V)
            ctx.save_for_backward(grad_hidden, *(None if g is None or p is None else _shorten(g, p) for g, p in kept))
        ctx.mark_non_differentiable(nll_sum, num_correct, nll_P)
        return loss_sum, nll_sum, num_correct, nll_P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # In place: a copy of the weight's gradient would cost as much as a tenth of its product. It makes a second
        # backward pass through the same graph an error of autograd's.
        scaled = (None if kept is None else kept.mul_(grad) for kept in ctx.saved_tensors)
        return *scaled, None, None, None


def _chunk_tokens(weight_VD: Tensor) -> int:
    """Returns how many tokens' logits are held at once."""
    return max(1, CHUNK_LOGITS.get(weight_VD.device.type, CHUNK_LOGITS["cpu"]) // weight_VD.shape[0])


def _add_product(sum_VD: Tensor, slope_PV: Tensor, hidden_PD: Tensor) -> None:
    """Adds `slope^T hidden` to a sum that may have a higher precision."""
    if sum_VD.dtype == hidden_PD.dtype:
        sum_VD.addmm_(slope_PV.t(), hidden_PD)
    else:
        sum_VD.add_(slope_PV.t() @ hidden_PD)


def _shorten(grad: Tensor, parameter: Tensor) -> Tensor:
    """Returns a gradient in the precision of its parameter, but for fp16.

    A sum over many tokens may pass the range of fp16 until the loss scale is known, in the backward pass; autograd
    rounds it then.
    """
    return grad if parameter.dtype == torch.float16 else grad.to(parameter.dtype)
