"""Distillation: divergence of a student's scores from a teacher's (Hinton et al. 2015).

    p = softmax(y / T) of the teacher, q = softmax(z / T) of the student
    forward_kl   T^2 sum p (log p - log q)      d / dz = T (q - p)
    reverse_kl   T^2 sum q (log q - log p)      d / dz = T q (log q - log p - sum q (log q - log p))
    mse          mean of (z - y)^2              d / dz = 2 (z - y) / V

of each target, over the real vocabulary, of a chunk of tokens at a time: the gradient is computed
beside that of the cross-entropy (`loss.py`), and no scores of all tokens exist. Of stored scores
the largest are compared, and one event for all other ids. Not here: the teacher
(`artifact/teacher.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.config.objective import DistillConfig
from pretrain.objective.chunk_loss import CrossEntropy
from pretrain.types import IGNORE_INDEX, Batch


class TopTokens(NamedTuple):
    """Largest scores of a teacher at P positions, as they are stored (`TaughtTokens`)."""

    ids_PG: Tensor
    scores_PG: Tensor
    rest_P2: Tensor

    def log_p(self, log_q_PV: Tensor, temperature: float) -> Tensor:
        """Returns log p of all ids, where the others share their mass as a student q does.

        Then sums over ids are sums over G + 1 events, the last of which is any other id.
        """
        top_PG = (self.scores_PG.to(log_q_PV.dtype) / temperature).log_softmax(dim=1)
        rest_P1 = self.rest_P2[:, 1:].to(log_q_PV.dtype)
        of_student_P1 = log_q_PV.scatter(1, self.ids_PG, -torch.inf).logsumexp(dim=1, keepdim=True)
        log_p_PV = log_q_PV + (rest_P1 - of_student_P1)
        return log_p_PV.scatter(1, self.ids_PG, top_PG + torch.log1p(-rest_P1.exp()))


@dataclass(frozen=True)
class Distillation:
    """What a model learns of a teacher on a batch.

    Attributes:
        settings: Divergence, weight and temperature.
        scores: Function of a chunk of the positions with a loss that returns the teacher's scores
            of it, [P, at least V], or the largest ones.
    """

    settings: DistillConfig
    scores: Callable[[slice], "Tensor | TopTokens"]

    def add(
        self,
        logits_PV: Tensor,
        targets_P1: Tensor,
        chunk: slice,
        form: CrossEntropy,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the weighted divergence of a chunk, a sum, and its gradient [P, real vocabulary].

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
        teacher = self.scores(chunk)
        if isinstance(teacher, Tensor):
            teacher = teacher[:, : form.vocab_size].to(exact)
        loss_P, grad_PV = DIVERGENCES[self.settings.kind](scores_PV, teacher, self.settings.temperature)
        factor_P1 = (targets_P1 != IGNORE_INDEX).to(exact) * self.settings.weight
        loss = (loss_P * factor_P1[:, 0]).sum()
        if not needs_grad:
            return loss, None
        grad_PV.mul_(factor_P1)
        return loss, grad_PV if cap_grad_PV is None else grad_PV.mul_(cap_grad_PV)


def learn_stored(settings: DistillConfig, batch: Batch) -> Distillation:
    """Returns what is learned of scores that come with a batch."""
    taught = batch.taught
    assert taught is not None, "rows with stored scores"
    arrays = [array.flatten(0, 1) for array in (taught.ids_BTG, taught.scores_BTG, taught.rest_BT2)]
    if batch.target_positions_P is not None:
        arrays = [array.index_select(0, batch.target_positions_P) for array in arrays]
    return Distillation(settings, lambda chunk: TopTokens(*(array[chunk] for array in arrays)))


def _kl(scores_PV: Tensor, teacher: Tensor | TopTokens, temperature: float, *, forward: bool) -> tuple[Tensor, Tensor]:
    """Returns the divergence of each token, and its gradient."""
    log_q_PV = (scores_PV / temperature).log_softmax(dim=1)
    if isinstance(teacher, TopTokens):
        log_p_PV = teacher.log_p(log_q_PV, temperature)
    else:
        log_p_PV = (teacher / temperature).log_softmax(dim=1)
    q_PV = log_q_PV.exp()
    if forward:
        p_PV = log_p_PV.exp()
        loss_P = (p_PV * (log_p_PV - log_q_PV)).sum(dim=1)
        return temperature**2 * loss_P, (q_PV - p_PV).mul_(temperature)
    ratio_PV = log_q_PV - log_p_PV
    loss_P = (q_PV * ratio_PV).sum(dim=1)
    return temperature**2 * loss_P, (q_PV * (ratio_PV - loss_P[:, None])).mul_(temperature)


def _mse(scores_PV: Tensor, teacher: Tensor | TopTokens, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns the mean squared difference of each token, over stored scores, and its gradient."""
    if isinstance(teacher, TopTokens):
        ids_PG = teacher.ids_PG
        difference_PG = scores_PV.gather(1, ids_PG) - (teacher.scores_PG + teacher.rest_P2[:, :1])
        grad_PG = difference_PG * (2 / difference_PG.shape[1])
        grad_PV = torch.zeros_like(scores_PV).scatter(1, ids_PG, grad_PG.to(scores_PV.dtype))
        return difference_PG.square().mean(dim=1).to(scores_PV.dtype), grad_PV
    difference_PV = scores_PV - teacher
    return difference_PV.square().mean(dim=1), difference_PV * (2 / difference_PV.shape[1])


DIVERGENCES: dict[str, Callable[[Tensor, Tensor | TopTokens, float], tuple[Tensor, Tensor]]] = {
    "forward_kl": partial(_kl, forward=True),
    "reverse_kl": partial(_kl, forward=False),
    "mse": _mse,
}
