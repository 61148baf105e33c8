"""The loss of tokens whose scores are cut by vocabulary over ranks (Shoeybi et al. 2019, 3).

    scores of all tokens for V / N ids  ->  five values a token, gathered: largest score, sum of exp,
                                            score of the target, first largest id, sum of scores
                                        ->  log Z, loss, gradient of this part of the scores

No rank has all scores of a token. Losses that are returned are of the tokens of this rank.
"""

from typing import Any

import torch
from torch import Tensor

from pretrain.types import IGNORE_INDEX


def sum_shared_chunk(
    logits_PV: Tensor,
    targets_P1: Tensor,
    mixed_P2: None,
    form: Any,
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
