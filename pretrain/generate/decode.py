"""Decoding one token at a time, greedy or drawn, many prompts at once.

    read the prompts, filling the cache -> draw a token a row -> feed them -> draw -> ...

Each step costs one forward of one token a row; rows that have ended leave the batch. Beam search is in `beam`.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pretrain.generate.constraints import Constraints
from pretrain.generate.incremental_decoder import Feed, Prompts, check_prompts, group_rows, new_token_limits
from pretrain.generate.sampling import GREEDY, RowSeeds, Sampling, sample
from pretrain.model import LanguageModel


@dataclass(frozen=True, slots=True)
class Continuation:
    """What was generated from one prompt.

    Attributes:
        tokens: New tokens, without the prompt and without the one that ended the row.
        score: Sum of the log-probabilities of the new tokens, the end counted, divided by their number to the power of
            the length penalty (1 outside beam search). Drawn tokens count with the model's own probability, before
            temperature and cuts.
        ended: Whether a token of `eos_ids` ended it; else its length did.
    """

    tokens: list[int]
    score: float
    ended: bool


class Drawn(NamedTuple):
    """A new token.

    Attributes:
        row: Index of its prompt.
        token: Its id.
        log_prob: Log-probability, under the constraints.
        ends: It is a token of `eos_ids`: the row is complete without it.
    """

    row: int
    token: int
    log_prob: float
    ends: bool


def generate(
    model: LanguageModel,
    prompts: Prompts,
    constraints: Constraints,
    sampling: Sampling = GREEDY,
    *,
    seed: int | Sequence[int] = 0,
) -> list[Continuation]:
    """Continues each prompt, or answers each source; a pure function of its arguments.

    The text of a row does not depend on the other prompts, up to rounding: scores of a batch and of a row alone differ
    in the last digits, which turns a choice between two tokens that are that close.

    Args:
        model: A model with a decoder; run in eval mode, and left in the mode that it was in.
        prompts: Token ids, of any lengths.
        constraints: What may come, and where it ends.
        sampling: How to draw.
        seed: Of the draws, see `RowSeeds`; or the seed of each row.

    Returns:
        One for each prompt, in order.

    Raises:
        ConfigError: The model cannot generate, or a prompt is empty, too long, or not of its vocabulary.
        CheckpointError: Its scores are not numbers.
    """
    tokens: list[list[int]] = [[] for _ in prompts]
    log_probs: list[list[float]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    for step in stream(model, prompts, constraints, sampling, seed=seed):
        for row, token, log_prob, ends in step:
            log_probs[row].append(log_prob)
            ended[row] = ends
            if not ends:
                tokens[row].append(token)
    scores = [sum(values) / max(1, len(values)) for values in log_probs]
    return [Continuation(*row) for row in zip(tokens, scores, ended, strict=True)]


def stream(
    model: LanguageModel,
    prompts: Prompts,
    constraints: Constraints,
    sampling: Sampling = GREEDY,
    *,
    seed: int | Sequence[int] = 0,
) -> Iterator[list[Drawn]]:
    """Yields the next token of every open row as it is drawn; arguments and errors are those of `generate`."""
    check_prompts(model, prompts)
    constraints.check(model.vocab_size)
    seeds = list(map(RowSeeds(seed), prompts)) if isinstance(seed, int) else seed
    assert len(seeds) == len(prompts)
    limits = new_token_limits(model, prompts, constraints.max_new_tokens)
    for rows in group_rows(model, prompts, limits):
        yield from _stream_group(model, rows, prompts, limits, constraints, sampling, seeds)


def _stream_group(
    model: LanguageModel,
    rows: list[int],
    prompts: Prompts,
    limits: Sequence[int],
    constraints: Constraints,
    sampling: Sampling,
    seeds: Sequence[int],
) -> Iterator[list[Drawn]]:
    longest = max(limits[row] for row in rows)
    if longest == 0:
        return
    feed = Feed(model, [prompts[row] for row in rows], longest, sees_prompt_whole=constraints.sees_prompt_whole)
    chance = {row: random.Random(seeds[row]) for row in rows}
    logits_BV = feed.start()
    for num_new in range(longest):
        is_last = [limits[row] == num_new + 1 for row in rows]
        log_probs_BV = constraints.log_probs(logits_BV, num_new, is_last)
        ids_B = sample(log_probs_BV, sampling, [chance[row].random() for row in rows])
        chosen = log_probs_BV.gather(1, ids_B[:, None])[:, 0].tolist()
        step = [
            Drawn(row, token, log_prob, token in constraints.eos_ids)
            for row, token, log_prob in zip(rows, ids_B.tolist(), chosen, strict=True)
        ]
        yield step
        kept = [place for place, drawn in enumerate(step) if not drawn.ends and not is_last[place]]
        if not kept:
            return
        if len(kept) < len(rows):
            rows = [rows[place] for place in kept]
            feed.select(kept)
            ids_B = ids_B[torch.tensor(kept, device=ids_B.device)]
        logits_BV = feed.step(ids_B)
