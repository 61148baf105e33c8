"""Distillation: divergence of a student's scores from a teacher's (Hinton et al. 2015).

    p = softmax(y / T) of the teacher, q = softmax(z / T) of the student
    forward_kl   T^2 sum p (log p - log q)      d / dz = T (q - p)
    reverse_kl   T^2 sum q (log q - log p)      d / dz = T q (log q - log p - sum q (log q - log p))
    mse          mean of (z - y)^2              d / dz = 2 (z - y) / V

of each target, over the real vocabulary, of a chunk of tokens at a time: the gradient is computed
beside that of the cross-entropy (`loss.py`), and no scores of all tokens exist. Not here: the
teacher (`artifact/teacher.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pretrain.config.objective import DistillConfig
from pretrain.objective.chunk_loss import CrossEntropy
from pretrain.types import IGNORE_INDEX


@dataclass(frozen=True)
class Distillation:
    """What a model learns of a teacher on a batch.

    Attributes:
        settings: Divergence, weight and temperature.
        scores: Function of a chunk of the positions with a loss that returns the teacher's scores
            of it, [P, at least V].
    """

    settings: DistillConfig
    scores: Callable[[slice], Tensor]

    def add(
        self, logits_PV: Tensor, targets_P1: Tensor, chunk: slice, form: CrossEntropy, needs_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the weighted divergence of a chunk, a sum, and its gradient [P, V] of the real vocabulary.

        Args:
            logits_PV: Scores of the student as the head gives them; not changed.
            targets_P1: Targets; those that are ignored add nothing.
            chunk: Places of the positions.
            form: Vocabulary and soft cap of the student.
            needs_grad: Whether to return the gradient.
        """
        exact = torch.promote_types(logits_PV.dtype, torch.float32)
        scores_PV = logits_PV[:, : form.vocab_size].to(exact)
        cap_grad_PV = None
        if form.soft_cap is not None:
            share_PV = (scores_PV / form.soft_cap).tanh()
            scores_PV = form.soft_cap * share_PV
            cap_grad_PV = 1 - share_PV.square()
        teacher_PV = self.scores(chunk)[:, : form.vocab_size].to(exact)
        loss_P, grad_PV = DIVERGENCES[self.settings.kind](scores_PV, teacher_PV, self.settings.temperature)
        factor_P1 = (targets_P1 != IGNORE_INDEX).to(exact) * self.settings.weight
        loss = (loss_P * factor_P1[:, 0]).sum()
        if not needs_grad:
            return loss, None
        grad_PV.mul_(factor_P1)
        return loss, grad_PV if cap_grad_PV is None else grad_PV.mul_(cap_grad_PV)


def _kl(scores_PV: Tensor, teacher_PV: Tensor, temperature: float, *, forward: bool) -> tuple[Tensor, Tensor]:
    """Returns the divergence of each token, and its gradient."""
    log_q_PV, log_p_PV = ((one / temperature).log_softmax(dim=1) for one in (scores_PV, teacher_PV))
    q_PV = log_q_PV.exp()
    if forward:
        p_PV = log_p_PV.exp()
        loss_P = (p_PV * (log_p_PV - log_q_PV)).sum(dim=1)
        return temperature**2 * loss_P, (q_PV - p_PV).mul_(temperature)
    ratio_PV = log_q_PV - log_p_PV
    loss_P = (q_PV * ratio_PV).sum(dim=1)
    return temperature**2 * loss_P, (q_PV * (ratio_PV - loss_P[:, None])).mul_(temperature)


def _mse(scores_PV: Tensor, teacher_PV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns the mean squared difference of each token, and its gradient."""
    difference_PV = scores_PV - teacher_PV
    return difference_PV.square().mean(dim=1), difference_PV * (2 / difference_PV.shape[1])


DIVERGENCES: dict[str, Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]] = {
    "forward_kl": partial(_kl, forward=True),
    "reverse_kl": partial(_kl, forward=False),
    "mse": _mse,
}
