"""The cross-entropy of a chunk of tokens and its slope, from their logits: the formula, and what is asked of it.

    z = cap tanh(logits / cap), or the logits        log Z = logsumexp(z)
    loss = (1 - s) (log Z - z_target) + s mean(log Z - z) + c (log Z)^2
    d loss / d z = (1 + 2 c log Z) softmax(z) - (1 - s) [target] - s / V

with label smoothing s (Szegedy et al. 2016, section 7), the coefficient c of the z-loss (Chowdhery et al. 2022, section
5) and the cap of Gemma 2 (Gemma Team 2024, section 2). The mean and V are of the real vocabulary: padding has no part.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.types import IGNORE_INDEX


class CrossEntropy(NamedTuple):
    """What is computed. Attributes: see `linear_cross_entropy`."""

    vocab_size: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float | None = None


class ChunkLoss(NamedTuple):
    """Sums over the targets of P tokens, and what their slope is made of.

    Attributes:
        loss: Scalar: what is minimised.
        nll_P1: -log p(target) alone, 0 where there is no target.
        nll: Scalar: its sum.
        num_correct: Scalar int64.
        exp_PV: exp(z - largest z), in fp32 or fp64.
        total_P1: Its sum over V.
        log_total_P1: log Z.
        bend_PV: Slope of the soft cap; None without one, or when no slope was asked for.
    """

    loss: Tensor
    nll_P1: Tensor
    nll: Tensor
    num_correct: Tensor
    exp_PV: Tensor
    total_P1: Tensor
    log_total_P1: Tensor
    bend_PV: Tensor | None


def score_chunk(logits_PV: Tensor, targets_P1: Tensor, form: CrossEntropy, for_slope: bool) -> ChunkLoss:
    """Computes the losses of P tokens in the precision of their logits, which it eats."""
    bend_PV = None
    if form.soft_cap is not None:
        logits_PV.div_(form.soft_cap).tanh_()
        bend_PV = 1 - logits_PV.square() if for_slope else None
        logits_PV.mul_(form.soft_cap)
    logits_PV[:, form.vocab_size :] = -torch.inf
    at_target_P1 = logits_PV.gather(1, targets_P1.clamp(min=0))
    mean_P1 = logits_PV[:, : form.vocab_size].mean(dim=1, keepdim=True) if form.label_smoothing else None
    # With its place: of tokens that are equally likely one is the answer, or a head of zeros would always be right.
    largest_P1, first_P1 = logits_PV.max(dim=1, keepdim=True)
    exp_PV = logits_PV.sub_(largest_P1).exp_()
    total_P1 = exp_PV.sum(dim=1, keepdim=True)
    log_total_P1 = total_P1.log() + largest_P1
    nll_P1 = log_total_P1 - at_target_P1
    loss_P1 = nll_P1
    if mean_P1 is not None:
        loss_P1 = torch.lerp(nll_P1, log_total_P1 - mean_P1, form.label_smoothing)
    if form.z_loss:
        loss_P1 = loss_P1 + form.z_loss * log_total_P1.square()
    ignored_P1 = targets_P1 == IGNORE_INDEX
    loss_P1, nll_P1 = (torch.where(ignored_P1, 0, values_P1) for values_P1 in (loss_P1, nll_P1))
    loss, nll = loss_P1.sum(), nll_P1.sum()
    return ChunkLoss(loss, nll_P1, nll, (first_P1 == targets_P1).sum(), exp_PV, total_P1, log_total_P1, bend_PV)


def slope_of_chunk(chunk: ChunkLoss, targets_P1: Tensor, form: CrossEntropy, dtype: torch.dtype) -> Tensor:
    """Returns d loss / d logits [P, V], zero where there is no target; eats the chunk.

    The division by the softmax's denominator comes last, in one pass with the rounding to `dtype`.
    """
    slope_PV = chunk.exp_PV
    if form.z_loss:
        slope_PV.mul_(1 + 2 * form.z_loss * chunk.log_total_P1)
    slope_PV.scatter_add_(1, targets_P1.clamp(min=0), (form.label_smoothing - 1) * chunk.total_P1)
    if form.label_smoothing:
        slope_PV[:, : form.vocab_size].sub_(form.label_smoothing / form.vocab_size * chunk.total_P1)
    if chunk.bend_PV is not None:
        slope_PV.mul_(chunk.bend_PV)
    scale_P1 = torch.where(targets_P1 == IGNORE_INDEX, 0, chunk.total_P1.reciprocal())
    out_PV = slope_PV if dtype == slope_PV.dtype else torch.empty_like(slope_PV, dtype=dtype)
    return torch.mul(slope_PV, scale_P1, out=out_PV)
