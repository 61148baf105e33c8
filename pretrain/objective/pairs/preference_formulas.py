"""Formulas of preferences: loss and margin of pairs from the log-probabilities of their answers.

    s_0, s_1    score of the chosen and of the rejected answer: log p, or less log p of the reference
    sigmoid     -(1 - e) log sigmoid(x) - e log sigmoid(-x),  x = beta (s_0 - s_1) - gamma
    squared     (s_0 - s_1 - 1 / (2 beta))^2
    odds        -s_0 - beta log sigmoid(log odds(s_0) - log odds(s_1)),  odds(s) = p / (1 - p)

All are float64 [A]; a pair is right where its margin, beta (s_0 - s_1), is above 0. Not here: the
gradient, which autograd takes of a formula, and the scores (`preferences.py`).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

_LARGEST_SCORE = -1e-12
"""Score of a certain answer here, whose odds are infinite."""


class PairLosses(NamedTuple):
    """Losses of A pairs, float64: the minimised one, the reported one without smoothing, and the margin."""

    loss_A: Tensor
    plain_A: Tensor
    margin_A: Tensor


def sigmoid_loss(scores_A2: Tensor, beta: float, label_smoothing: float = 0.0, gamma: float = 0.0) -> PairLosses:
    """Returns the losses of DPO and SimPO; `gamma` is the margin that answers should have at least."""
    margin_A = beta * (scores_A2[:, 0] - scores_A2[:, 1])
    plain_A = -logsigmoid(margin_A - gamma)
    wrong_A = -logsigmoid(gamma - margin_A)
    return PairLosses((1 - label_smoothing) * plain_A + label_smoothing * wrong_A, plain_A, margin_A)


def squared_loss(scores_A2: Tensor, beta: float) -> PairLosses:
    """Returns the losses of IPO: the distance of the difference from 1 / (2 beta)."""
    difference_A = scores_A2[:, 0] - scores_A2[:, 1]
    loss_A = (difference_A - 1 / (2 * beta)).square()
    return PairLosses(loss_A, loss_A, beta * difference_A)


def odds_loss(scores_A2: Tensor, beta: float) -> PairLosses:
    """Returns the losses of ORPO: -log p of the chosen answer, and `beta` times -log sigmoid of the ratio of odds."""
    certain_A2 = scores_A2.clamp(max=_LARGEST_SCORE)
    log_odds_A2 = scores_A2 - torch.log(-torch.expm1(certain_A2))
    loss_A = -scores_A2[:, 0] - beta * logsigmoid(log_odds_A2[:, 0] - log_odds_A2[:, 1])
    return PairLosses(loss_A, loss_A, beta * (scores_A2[:, 0] - scores_A2[:, 1]))
