"""Decoding one token at a time, greedy or drawn (temperature, top-k, top-p), many prompts at once.

Each step costs one forward of one token a row; rows that have ended leave the batch. The seed of a
row depends on its prompt alone. Beam search is in `beam`.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.errors import ConfigError
from pretrain.generation.constraints import Constraints
from pretrain.generation.incremental_decoder import (
    IncrementalDecoder,
    Prompt,
    Prompts,
    check_prompts,
    group_rows,
    new_token_limits,
    read_with_check,
)
from pretrain.model import LanguageModel


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of sampling, in the order in which they apply.

    Raises: ConfigError, for a value outside its range.
    """

    temperature: float = 1.0  # divides the scores; 0 is greedy
    top_k: int = 0  # draw among the k best only; 0: all
    # Draw among the fewest best tokens whose probabilities sum to p (Holtzman et al. 2020).
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature={self.temperature} must be a number from 0 on",
                fix="use 0 for greedy",
            )
        if self.top_k < 0:
            raise ConfigError(
                f"top_k={self.top_k} must not be negative",
                fix="use 0 to draw among all tokens",
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(
                f"top_p={self.top_p} must be above 0 and at most 1",
                fix="use 1 to draw among all tokens",
            )


GREEDY = Sampling(temperature=0.0)

_COLDEST = 1e-30
"""Colder ones would make scores infinite, and draw the same: the best token."""


def sample(scores_BV: Tensor, sampling: Sampling, uniforms_B: Sequence[float]) -> Tensor:
    """Draws one token a row, by the inverse of the cumulative distribution, the best token first.

    Scores are logits or log-probabilities, -inf for excluded tokens; of equal ones the first is the
    better. Each row has a number of [0, 1), not used by greedy. Returns ids_B, int64.
    """
    if sampling.temperature == 0:
        return scores_BV.argmax(dim=-1)  # the first of equal scores
    scaled_BV = scores_BV.float() / max(sampling.temperature, _COLDEST)
    ordered_BV, order_BV = _sort(scaled_BV)
    if sampling.top_k:
        ordered_BV[:, sampling.top_k :] = -torch.inf
    # In fp64: the sum over a large vocabulary must not round away its tail.
    weights_BV = ordered_BV.double().softmax(dim=-1)
    totals_BV = weights_BV.cumsum(dim=-1)
    # A token stays if those before it sum to less than p: the best one always does.
    kept_BV = (totals_BV - weights_BV < sampling.top_p) & (weights_BV > 0)
    # Of NaN none stays: an index of -1 would end the process of a GPU before the host has seen them.
    last_B1 = (kept_BV.sum(dim=-1, keepdim=True) - 1).clamp_(min=0)
    uniforms_B1 = torch.tensor(uniforms_B, dtype=torch.float64, device=scores_BV.device)[:, None]
    marks_B1 = uniforms_B1 * totals_BV.gather(1, last_B1)
    drawn_B1 = torch.searchsorted(totals_BV, marks_B1, right=True)
    return order_BV.gather(1, drawn_B1.minimum(last_B1)).squeeze(1)


def _sort(scores_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Returns fp32 scores from the best down, and their ids; of equal ones the first comes first."""
    if scores_BV.device.type != "cpu":
        return scores_BV.sort(dim=-1, descending=True, stable=True)
    # numpy sorts integers 20 times as fast as torch sorts numbers with their indices: the order of
    # the scores in the upper 32 bits, reversed, and the ids in the lower ones.
    bits_BV = scores_BV.view(torch.int32).long()
    ranks_BV = torch.where(bits_BV < 0, bits_BV + 2**31, -bits_BV)
    keys_BV = (ranks_BV << 32) + torch.arange(scores_BV.shape[1])
    keys_BV.numpy().sort(axis=-1)
    order_BV = keys_BV & (2**32 - 1)
    return scores_BV.gather(1, order_BV), order_BV


class RowSeeds:
    """Gives each row a seed of its own, so that its draws do not depend on its batch.

    A seed is a pure function of the global seed, the prompt's ids, and the number of equal prompts
    before: the order of prompts and their batches do not matter, and equal prompts get different
    texts.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._seen = Counter[bytes]()

    def __call__(self, prompt: Prompt) -> int:
        values = prompt.flatten().tolist() if isinstance(prompt, Tensor) else list(prompt)
        identity = repr((self._seed, values)).encode()
        key = hashlib.blake2b(identity, digest_size=16).digest()
        self._seen[key] += 1
        numbered = key + repr(self._seen[key]).encode()
        return int.from_bytes(hashlib.blake2b(numbered, digest_size=8).digest())


@dataclass(frozen=True, slots=True)
class Continuation:
    """The tokens generated from one prompt, without the one that ended the row."""

    tokens: list[int]
    # Sum of the log-probabilities of the new tokens, the end included, divided by their number to
    # the power of the length penalty (1 outside beam search). Drawn tokens count with the model's
    # own probability, before temperature and cuts.
    score: float
    ended: bool  # true: by a token of `eos_ids` or what it says, rather than its length


class SampledToken(NamedTuple):
    """A new token of the prompt number `row`, with its log-probability under the constraints.

    `ends`: it is a token of `eos_ids`, and the row is complete without it.
    """

    row: int
    token: int
    log_prob: float
    ends: bool


IsComplete = Callable[[list[int]], bool]
"""Whether a row ends with the newest of its new tokens, which it keeps."""


def generate(
    model: LanguageModel,
    prompts: Prompts,
    constraints: Constraints,
    sampling: Sampling = GREEDY,
    *,
    seed: int | Sequence[int] = 0,
    is_complete: IsComplete | None = None,
) -> list[Continuation]:
    """Continues each prompt, or answers each source, in order; a pure function of its arguments.

    The text of a row does not depend on the other prompts, up to rounding: scores of a batch and of
    a row alone differ in the last digits, which may decide between two nearly equal tokens. The
    model is run in eval mode, its mode restored. `seed` is that of `RowSeeds`, or the seed of each
    row.

    Raises:
        ConfigError: The model cannot generate, or a prompt is empty, too long, or not of its
            vocabulary.
        CheckpointError: The model's scores are NaN.
    """
    tokens: list[list[int]] = [[] for _ in prompts]
    log_probs: list[list[float]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    closed: set[int] = set()
    for step in stream(model, prompts, constraints, sampling, seed=seed, closed=closed):
        for row, token, log_prob, ends in step:
            log_probs[row].append(log_prob)
            ended[row] = ends
            if not ends:
                tokens[row].append(token)
                if is_complete is not None and is_complete(tokens[row]):
                    ended[row] = True
                    closed.add(row)
    scores = [sum(values) / max(1, len(values)) for values in log_probs]
    return [Continuation(*row) for row in zip(tokens, scores, ended, strict=True)]


def stream(
    model: LanguageModel,
    prompts: Prompts,
    constraints: Constraints,
    sampling: Sampling = GREEDY,
    *,
    seed: int | Sequence[int] = 0,
    closed: Container[int] = (),
) -> Iterator[list[SampledToken]]:
    """Yields the next token of every open row as it is drawn, for the arguments of `generate`.

    `closed` are rows that the caller ends, after any step.
    """
    check_prompts(model, prompts)
    constraints.check(model.vocab_size)
    seeds = list(map(RowSeeds(seed), prompts)) if isinstance(seed, int) else seed
    assert len(seeds) == len(prompts)
    limits = new_token_limits(model, prompts, constraints)
    for rows in group_rows(model, prompts, limits):
        longest = max(limits[row] for row in rows)
        if longest == 0:
            continue
        batch = [prompts[row] for row in rows]
        sees_whole = constraints.sees_prompt_whole
        feed = IncrementalDecoder(model, batch, longest, sees_prompt_whole=sees_whole)
        last = {row: limits[row] - 1 for row in rows}
        chance = {row: random.Random(seeds[row]) for row in rows}
        yield from _stream_batch(feed, last, chance, constraints, sampling, closed)


def _stream_batch(
    feed: IncrementalDecoder,
    last: Mapping[int, int],
    chance: Mapping[int, random.Random],
    constraints: Constraints,
    sampling: Sampling,
    closed: Container[int],
) -> Iterator[list[SampledToken]]:
    """Yields the tokens of the rows of a batch, until the number of each row's `last` one."""
    rows = list(last)
    logits_BV = feed.start()
    for num_new in range(1 + max(last.values())):
        is_last = [last[row] == num_new for row in rows]
        log_probs_BV = constraints.log_probs(logits_BV, feed.read_BT, num_new, is_last)
        ids_B = sample(log_probs_BV, sampling, [chance[row].random() for row in rows])
        chosen_B = log_probs_BV.gather(1, ids_B[:, None])[:, 0]
        ids, chosen = read_with_check(logits_BV, ids_B, chosen_B)
        step = [
            SampledToken(row, int(token), log_prob, int(token) in constraints.eos_ids)
            for row, token, log_prob in zip(rows, ids, chosen, strict=True)
        ]
        yield step
        # An ended row leaves the batch, and its cache with it.
        ended = [one.ends or one.row in closed or last[one.row] == num_new for one in step]
        places = [place for place, has_ended in enumerate(ended) if not has_ended]
        if not places:
            break
        if len(places) < len(rows):
            rows = [rows[place] for place in places]
            feed.select(places)
            ids_B = ids_B[torch.tensor(places, device=ids_B.device)]
        logits_BV = feed.step(ids_B)
