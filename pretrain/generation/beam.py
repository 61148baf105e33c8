"""Beam search: the likeliest continuations, with `num_beams` open ones at a time for each prompt.

It finds the results of `generate` of transformers, with the same scores, token for token. Two of
its rules are kept on purpose, since released translators are tuned with them: a candidate that ends
a row counts only among the `num_beams` best of its step, and `early_stopping=False` compares open
and finished beams at the present length.

Memory: the cache of `rows x num_beams` rows, and while it is reordered a second copy of one layer.
Time: one forward of as many tokens a step. Finished rows leave the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pretrain.errors import ConfigError
from pretrain.generation.constraints import Constraints
from pretrain.generation.incremental_decoder import (
    IncrementalDecoder,
    Prompts,
    check_prompts,
    group_rows,
    new_token_limits,
    read_with_check,
)
from pretrain.generation.sampling import Continuation, IsComplete
from pretrain.model import LanguageModel

MAX_LENGTH_PENALTY = 10.0


@dataclass(frozen=True, slots=True)
class Beams:
    """Settings of a beam search. Raises: ConfigError, for a value outside its range."""

    num_beams: int  # open beams of each prompt
    # A finished beam's score is its log-probability divided by its number of new tokens to this
    # power (after Wu et al. 2016, 7): above 0 favours long ones, 0 is the plain log-probability.
    length_penalty: float = 1.0
    # End of a search with `num_beams` finished beams. True: at once. False: when the best open one,
    # were it finished now, would not be among them. "never": when it cannot come among them any
    # more; with a penalty above 0 judged by its log-probability now and the greatest length.
    early_stopping: bool | Literal["never"] = False
    num_return: int = 1  # finished beams to return, the best first

    def __post_init__(self) -> None:
        if self.num_beams < 1:
            raise ConfigError(f"num_beams={self.num_beams} must be at least 1", fix="use 4 or so")
        if not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:
            bounds = f"-{MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}"
            raise ConfigError(
                f"length_penalty={self.length_penalty} must be between {bounds}",
                fix="use 1 to judge by the mean over tokens",
            )
        if self.early_stopping not in (True, False, "never"):
            raise ConfigError(
                f"early_stopping={self.early_stopping!r} is unknown",
                fix='use true, false or "never"',
            )
        if not 1 <= self.num_return <= self.num_beams:
            bounds = f"1 and num_beams={self.num_beams}"
            raise ConfigError(
                f"num_return={self.num_return} (--n-best) must be between {bounds}",
                fix="use more beams",
            )

    def score(self, log_prob: float, num_new: int) -> float:
        """Returns the score of a beam of `num_new` tokens."""
        return log_prob / num_new**self.length_penalty


class _Open(NamedTuple):
    """An open beam: the parent's index in the row before the step, new tokens, log-probability."""

    parent: int
    tokens: list[int]
    log_prob: float


class _Search:
    """The search of one prompt: its open beams, and the best finished ones."""

    def __init__(self, limit: int, beams: Beams, ends: Sequence[int], stop: IsComplete | None) -> None:
        self.limit, self._beams, self._eos_ids, self._is_complete = limit, beams, ends, stop
        self.open = [_Open(0, [], 0.0)]
        self.finished: list[Continuation] = []

    def advance(self, candidates: Sequence[tuple[float, int, int]], num_new: int) -> None:
        """Extends the beams to `num_new` tokens, by (log_prob, parent, token), the best first."""
        last = num_new == self.limit
        extended: list[_Open] = []
        for rank, (log_prob, parent, token) in enumerate(candidates):
            if log_prob == -torch.inf or len(extended) == self._beams.num_beams:
                break
            ends = token in self._eos_ids
            tokens = self.open[parent].tokens + ([] if ends else [token])
            ends = ends or (self._is_complete is not None and self._is_complete(tokens))
            if not ends and not last:
                extended.append(_Open(parent, tokens, log_prob))
            elif rank < self._beams.num_beams:
                self.finished.append(Continuation(tokens, self._beams.score(log_prob, num_new), ends))
        self.finished.sort(key=lambda continuation: -continuation.score)
        del self.finished[self._beams.num_beams :]
        self.open = extended

    def is_done(self, num_new: int) -> bool:
        """Returns whether no open beam can change the result, after `num_new` tokens."""
        if not self.open or num_new == self.limit:
            return True
        if len(self.finished) < self._beams.num_beams:
            return False
        if self._beams.early_stopping is True:
            return True
        farthest = self._beams.early_stopping == "never" and self._beams.length_penalty > 0
        possible = self._beams.score(self.open[0].log_prob, self.limit if farthest else num_new)
        return possible <= self.finished[-1].score


def beam_search(
    model: LanguageModel,
    prompts: Prompts,
    constraints: Constraints,
    beams: Beams,
    *,
    is_complete: IsComplete | None = None,
) -> list[list[Continuation]]:
    """Finds the `num_return` likeliest continuations of each prompt, or answers to each source.

    A pure function, like `generate`, with the same errors and `is_complete`. The best come first;
    there may be fewer.
    """
    check_prompts(model, prompts)
    constraints.check(model.vocab_size)
    limits = new_token_limits(model, prompts, constraints)
    searches = [_Search(limit, beams, constraints.eos_ids, is_complete) for limit in limits]
    if constraints.max_new_tokens > 0:
        for rows in group_rows(model, prompts, limits):
            batch = [prompts[row] for row in rows]
            _search_batch(model, batch, [searches[row] for row in rows], constraints, beams)
    return [search.finished[: beams.num_return] for search in searches]


def _search_batch(
    model: LanguageModel, prompts: Prompts, searches: list[_Search], constraints: Constraints, beams: Beams
) -> None:
    longest = max(search.limit for search in searches)
    sees_whole = constraints.sees_prompt_whole
    feed = IncrementalDecoder(model, prompts, longest, sees_prompt_whole=sees_whole)
    # At least `num_beams` candidates do not end, if each beam had all ends among its best.
    num_candidates = (1 + max(1, len(constraints.eos_ids))) * beams.num_beams
    logits_BV = feed.start()
    width = 1  # the first step has one beam a row
    for num_new in range(1, longest + 1):
        is_last = [search.limit == num_new for search in searches for _ in range(width)]
        log_probs_BV = constraints.log_probs(logits_BV, feed.read_BT, num_new - 1, is_last, searches=True)
        past = [beam.log_prob for beam in _open_beams(searches)]
        best = _best_candidates(logits_BV, log_probs_BV, past, width, num_candidates)
        for search, candidates in zip(searches, best, strict=True):
            search.advance(candidates, num_new)
        places = [place for place, search in enumerate(searches) if not search.is_done(num_new)]
        if not places:
            return
        searches = [searches[place] for place in places]
        parents: list[int] = []
        for place, search in zip(places, searches, strict=True):
            # Fewer beams than there is room for: the rest is filled with impossible ones.
            idle = search.open[0]._replace(log_prob=-torch.inf)
            search.open += [idle] * (beams.num_beams - len(search.open))
            parents += [place * width + beam.parent for beam in search.open]
        if parents != list(range(len(past))):
            feed.select(parents)
        width = beams.num_beams
        newest = [beam.tokens[-1] for beam in _open_beams(searches)]
        logits_BV = feed.step(torch.tensor(newest, device=logits_BV.device))


def _open_beams(searches: Sequence[_Search]) -> list[_Open]:
    return [beam for search in searches for beam in search.open]


def _best_candidates(
    logits_BV: Tensor, log_probs_BV: Tensor, past: list[float], width: int, count: int
) -> list[list[tuple[float, int, int]]]:
    """Returns the best (log_prob, parent, token) of each prompt of `width` beams."""
    past_B1 = torch.tensor(past, device=log_probs_BV.device)[:, None]
    vocab = log_probs_BV.shape[1]
    sums = (log_probs_BV + past_B1).view(-1, width * vocab)
    best = sums.topk(min(count, width * vocab))
    size = best.values.shape[1]
    values, indices = read_with_check(logits_BV, best.values, best.indices)
    pairs = [(value, *divmod(int(index), vocab)) for value, index in zip(values, indices, strict=True)]
    return [pairs[start : start + size] for start in range(0, len(pairs), size)]
