"""The loss of a chunk of tokens from its scores, on one rank or cut by vocabulary over ranks.

    sum_chunk           scores of P tokens  ->  loss, gradient of the scores
    sum_shared_chunk    the same of scores that ranks share (Shoeybi et al. 2019, 3)

    scores of all tokens for V / N ids  ->  five values a token, gathered: largest score, sum of exp,
                                            score of the target, first largest id, sum of scores
                                        ->  log Z, loss, gradient of this part of the scores

No rank has all scores of a token. Losses that are returned are of the tokens of this rank.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretrain.types import IGNORE_INDEX


class CrossEntropy(NamedTuple):
    """Terms of the loss; attributes as in `linear_cross_entropy`."""

    vocab_size: int
    label_smoothing: float
    z_loss: float
    soft_cap: float | None


class ChunkLoss(NamedTuple):
    """Sums over the targets of P tokens, and intermediate values for the gradient of their logits.

    `exp_PV` is exp(z - largest z) in fp32 or fp64, `total_P1` its sum, `log_total_P1` log Z (None
    without a z-loss and label smoothing), and `cap_grad_PV` the derivative of the soft cap; None
    without a cap or without `needs_grad`. `place_P1` is the column of the target, 0 where it is
    `ignored_P1`.
    """

    loss: Tensor
    nll_P1: Tensor
    num_correct: Tensor
    place_P1: Tensor
    ignored_P1: Tensor
    exp_PV: Tensor
    total_P1: Tensor
    log_total_P1: Tensor | None
    cap_grad_PV: Tensor | None


def score_chunk(
    logits_PV: Tensor, targets_P1: Tensor, mixed_P2: Tensor | None, form: CrossEntropy, needs_grad: bool
) -> ChunkLoss:
    """Computes the losses of P tokens in the precision of their logits, modified in place."""
    cap_grad_PV = None
    if form.soft_cap is not None:
        logits_PV.div_(form.soft_cap).tanh_()
        cap_grad_PV = 1 - logits_PV.square() if needs_grad else None
        logits_PV.mul_(form.soft_cap)
    logits_PV[:, form.vocab_size :] = -torch.inf
    place_P1 = targets_P1.clamp(min=0)
    at_target_P1 = logits_PV.gather(1, place_P1)
    if mixed_P2 is not None:
        second_P1, share_P1 = mixed_P2.to(logits_PV.dtype).split(1, dim=1)
        at_target_P1 = torch.lerp(at_target_P1, logits_PV.gather(1, second_P1.long()), share_P1)
    mean_P1 = None
    if form.label_smoothing:
        mean_P1 = logits_PV[:, : form.vocab_size].mean(dim=1, keepdim=True)
    # Among equal scores only the first is correct, else a head of zeros is always right.
    largest_P1, first_P1 = logits_PV.max(dim=1, keepdim=True)
    exp_PV = logits_PV.sub_(largest_P1).exp_()
    total_P1 = exp_PV.sum(dim=1, keepdim=True)
    # The difference of logits first: log Z - z_target would round a loss near 0 like the logits.
    nll_P1 = total_P1.log() - (at_target_P1 - largest_P1)
    log_total_P1 = None
    if form.z_loss or mean_P1 is not None:
        log_total_P1 = total_P1.log() + largest_P1
    ignored_P1 = targets_P1 == IGNORE_INDEX
    loss_P1 = nll_P1 = nll_P1.masked_fill(ignored_P1, 0)
    if mean_P1 is not None and log_total_P1 is not None:
        loss_P1 = torch.lerp(nll_P1, log_total_P1 - mean_P1, form.label_smoothing)
    if form.z_loss and log_total_P1 is not None:
        loss_P1 = loss_P1 + form.z_loss * log_total_P1.square()
    if log_total_P1 is not None:
        loss_P1 = loss_P1.masked_fill(ignored_P1, 0)
    return ChunkLoss(
        loss=loss_P1.sum(),
        nll_P1=nll_P1,
        num_correct=(first_P1 == targets_P1).sum(),
        place_P1=place_P1,
        ignored_P1=ignored_P1,
        exp_PV=exp_PV,
        total_P1=total_P1,
        log_total_P1=log_total_P1,
        cap_grad_PV=cap_grad_PV,
    )


def grad_of_chunk(
    chunk: ChunkLoss, mixed_P2: Tensor | None, form: CrossEntropy, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Returns d loss / d logits [P, V], zero where there is no target. Modifies the chunk in place.

    The division by the softmax's denominator comes last, in one pass with the rounding to `dtype`.
    """
    grad_PV = chunk.exp_PV
    if form.z_loss and chunk.log_total_P1 is not None:
        grad_PV.mul_(1 + 2 * form.z_loss * chunk.log_total_P1)
    at_target_P1 = (form.label_smoothing - 1) * chunk.total_P1
    if mixed_P2 is not None:
        second_P1, share_P1 = mixed_P2.to(grad_PV.dtype).split(1, dim=1)
        grad_PV.scatter_add_(1, second_P1.long(), at_target_P1 * share_P1)
        at_target_P1 = at_target_P1 * (1 - share_P1)
    if torch.compiler.is_compiling():
        # Fused with the passes around it; for a scatter the compiler would store the chunk in fp32.
        columns_V = torch.arange(grad_PV.shape[1], device=grad_PV.device)
        grad_PV.add_(torch.where(columns_V == chunk.place_P1, at_target_P1, 0))
    else:
        grad_PV.scatter_add_(1, chunk.place_P1, at_target_P1)
    if form.label_smoothing:
        grad_PV[:, : form.vocab_size].sub_(form.label_smoothing / form.vocab_size * chunk.total_P1)
    if chunk.cap_grad_PV is not None:
        grad_PV.mul_(chunk.cap_grad_PV)
    scale_P1 = chunk.total_P1.reciprocal().masked_fill(chunk.ignored_P1, 0)
    out_PV = grad_PV if dtype == grad_PV.dtype else torch.empty_like(grad_PV, dtype=dtype)
    return torch.mul(grad_PV, scale_P1, out=out_PV)


def sum_chunk(
    logits_PV: Tensor, targets_P1: Tensor, mixed_P2: Tensor | None, form: CrossEntropy, needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the loss, nll_P1, the correct targets and d loss / d logits (in their dtype) of P tokens."""
    exact = torch.promote_types(logits_PV.dtype, torch.float32)
    chunk = score_chunk(logits_PV.to(exact), targets_P1, mixed_P2, form, needs_grad)
    grad_PV = grad_of_chunk(chunk, mixed_P2, form, logits_PV.dtype) if needs_grad else None
    return chunk.loss, chunk.nll_P1, chunk.num_correct, grad_PV


def sum_shared_chunk(
    logits_PV: Tensor,
    targets_P1: Tensor,
    mixed_P2: None,
    form: CrossEntropy,
    needs_grad: bool,
    *,
    shared: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns loss, nll_P1, correct targets of this rank's tokens, d loss / d logits. Collective.

    Args:
        logits_PV: Scores of the tokens of all ranks, for this rank's part of the vocabulary.
        targets_P1: Targets of these tokens.
        mixed_P2: Always None.
        form: Terms of the loss (`CrossEntropy`); `vocab_size` is that of all ranks.
        needs_grad: Whether to return the gradient.
        shared: The ranks (`TensorRanks`).
    """
    exact = torch.promote_types(logits_PV.dtype, torch.float32)
    scores_PV = logits_PV.to(exact)
    width = scores_PV.shape[1]
    first_id = shared.rank * width
    num_real = min(max(form.vocab_size - first_id, 0), width)
    cap_grad_PV = None
    if form.soft_cap is not None:
        scores_PV.div_(form.soft_cap).tanh_()
        cap_grad_PV = 1 - scores_PV.square() if needs_grad else None
        scores_PV.mul_(form.soft_cap)
    scores_PV[:, num_real:] = -torch.inf
    place_P1 = targets_P1 - first_id
    is_here_P1 = (place_P1 >= 0) & (place_P1 < width) & (targets_P1 != IGNORE_INDEX)
    place_P1 = torch.where(is_here_P1, place_P1, 0)
    at_target_P1 = torch.where(is_here_P1, scores_PV.gather(1, place_P1), 0.0)
    sum_P1 = scores_PV[:, :num_real].sum(dim=1, keepdim=True)
    own_largest_P1, own_first_P1 = scores_PV.max(dim=1, keepdim=True)
    # Finite, where all ids of this rank are padding.
    own_largest_P1 = own_largest_P1.clamp(min=torch.finfo(exact).min)
    exp_PV = scores_PV.sub_(own_largest_P1).exp_()
    own_total_P1 = exp_PV.sum(dim=1, keepdim=True)
    # Ids are exact in fp32, below 2^24.
    own = (own_largest_P1, own_total_P1, at_target_P1, (own_first_P1 + first_id).to(exact), sum_P1)
    found_NP5 = shared.collect(torch.cat(own, dim=1)[None], 0)
    largest_NP, totals_NP, targets_NP, first_NP, sums_NP = found_NP5.unbind(dim=2)
    # The first of equal ones: ranks are in the order of their ids.
    largest_1P, owner_1P = largest_NP.max(dim=0, keepdim=True)
    totals_NP = totals_NP * (largest_NP - largest_1P).exp()
    total_P1 = totals_NP.sum(dim=0)[:, None]
    log_total_P1 = total_P1.log() + largest_1P.T
    # As in `score_chunk`: log Z - z_target would round a loss near 0 like the logits.
    nll_P1 = total_P1.log() - (targets_NP.sum(dim=0)[:, None] - largest_1P.T)
    loss_P1 = nll_P1
    if form.label_smoothing:
        mean_P1 = sums_NP.sum(dim=0)[:, None] / form.vocab_size
        loss_P1 = torch.lerp(nll_P1, log_total_P1 - mean_P1, form.label_smoothing)
    if form.z_loss:
        loss_P1 = loss_P1 + form.z_loss * log_total_P1.square()
    ignored_P1 = targets_P1 == IGNORE_INDEX
    loss_P1, nll_P1 = (torch.where(ignored_P1, 0, values_P1) for values_P1 in (loss_P1, nll_P1))
    is_correct_P1 = targets_P1 == first_NP.gather(0, owner_1P).T
    mine = shared.own(len(targets_P1))
    shown = loss_P1[mine].sum(), nll_P1[mine], is_correct_P1[mine].sum()
    if not needs_grad:
        return *shown, None
    # exp is relative to the largest score of this rank, total to that of all.
    factor_P1 = (own_largest_P1 - largest_1P.T).exp()
    if form.z_loss:
        factor_P1 = factor_P1 * (1 + 2 * form.z_loss * log_total_P1)
    grad_PV = exp_PV.mul_(factor_P1)
    of_target_P1 = torch.where(is_here_P1, (form.label_smoothing - 1) * total_P1, 0.0)
    grad_PV.scatter_add_(1, place_P1, of_target_P1)
    if form.label_smoothing:
        grad_PV[:, :num_real].sub_(form.label_smoothing / form.vocab_size * total_P1)
    if cap_grad_PV is not None:
        grad_PV.mul_(cap_grad_PV)
    grad_PV.mul_(torch.where(ignored_P1, 0, total_P1.reciprocal()))
    return *shown, grad_PV.to(logits_PV.dtype)
