"""Choosing the next token from its scores: greedy, temperature, top-k, top-p. Pure: chance comes in as a number."""

import hashlib
from collections import Counter
from collections.abc import Sequence
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


def sample(scores_BV: Tensor, sampling: Sampling, uniforms_B: Sequence[float]) -> Tensor:
    """Draws one token a row, by the inverse of the cumulative distribution over the tokens from the best down.

    Args:
        scores_BV: Logits or log-probabilities; -inf for tokens that must not be drawn.
        sampling: How to draw.
        uniforms_B: A number of [0, 1) for each row; greedy does not read them.

    Returns:
        ids_B, int64, on the device of the scores. Of equal scores the first is the better one.
    """
    if sampling.temperature == 0:
        return scores_BV.argmax(dim=-1)
    ordered_BV, order_BV = (scores_BV.float() / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ordered_BV[:, sampling.top_k :] = -torch.inf
    # In fp64: the sum over a large vocabulary must not round away its tail.
    weights_BV = ordered_BV.double().softmax(dim=-1)
    totals_BV = weights_BV.cumsum(dim=-1)
    # A token stays if those before it do not yet sum to p: the best one always does. None has a weight of 0.
    kept_BV = (totals_BV - weights_BV < sampling.top_p) & (weights_BV > 0)
    last_B1 = kept_BV.sum(dim=-1, keepdim=True) - 1
    uniforms_B1 = torch.tensor(uniforms_B, dtype=torch.float64, device=scores_BV.device)[:, None]
    drawn_B1 = torch.searchsorted(totals_BV, uniforms_B1 * totals_BV.gather(1, last_B1), right=True)
    return order_BV.gather(1, drawn_B1.minimum(last_B1)).squeeze(1)


class RowSeeds:
    """Gives each row a seed of its own, so that its draws do not depend on the batch that it is in.

    A pure function of the seed, the ids of the prompt, and how many equal prompts came before: the order of prompts and
    how they are split into batches do not matter, and equal prompts still get different texts.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._seen = seed, Counter[bytes]()

    def __call__(self, prompt: Sequence[int]) -> int:
        """Returns the seed of the next row that begins with `prompt`."""
        key = hashlib.blake2b(repr((self._seed, list(prompt))).encode(), digest_size=16).digest()
        self._seen[key] += 1
        return int.from_bytes(hashlib.blake2b(key + repr(self._seen[key]).encode(), digest_size=8).digest())
