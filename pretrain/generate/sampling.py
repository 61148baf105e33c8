"""Choosing the next token from its scores: greedy, temperature, top-k, top-p. Pure given the generator."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. The cuts apply in the order temperature, top-k, top-p.

    Attributes:
        temperature: Divides the scores; 0 is greedy.
        top_k: Draw among the k best only; 0: all.
        top_p: Draw among the fewest best whose probabilities sum to at least p (Holtzman et al. 2020); 1: all.

    Raises:
        ConfigError: A value outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature} must be a number from 0 on", fix="use 0 for greedy")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} must not be negative", fix="use 0 to draw among all tokens")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be above 0 and at most 1", fix="use 1 to draw among all tokens")


GREEDY = Sampling(temperature=0.0)


def sample(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Draws one token a row.

    Args:
        logits_BV: Scores; -inf for tokens that must not be drawn.
        sampling: How to draw.
        generator: On the CPU: the draw happens there, so that a seed means the same on every device.

    Returns:
        ids_B, int64, on the device of the scores. Of equal scores greedy takes the first.
    """
    if sampling.temperature == 0:
        return logits_BV.argmax(dim=-1)
    scores_BV, order_BV = (logits_BV.float().cpu() / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        scores_BV[:, sampling.top_k :] = -torch.inf
    weights_BV = scores_BV.softmax(dim=-1)
    # A token stays if those before it do not yet sum to p: the best one always does.
    weights_BV[weights_BV.cumsum(dim=-1) - weights_BV >= sampling.top_p] = 0
    drawn_B1 = torch.multinomial(weights_BV, 1, generator=generator)
    return order_BV.gather(1, drawn_B1).squeeze(1).to(logits_BV.device)
