"""From prompt text to new text: a decoder continues it, an encoder-decoder answers it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from pretrain.errors import ConfigError
from pretrain.generate.beam import Beams, beam_search
from pretrain.generate.codec import Codec
from pretrain.generate.constraints import Constraints
from pretrain.generate.decode import Continuation, generate, stream
from pretrain.generate.detokenize import Detokenizer, text_after
from pretrain.generate.incremental_decoder import check_prompt, check_prompts
from pretrain.generate.sampling import RowSeeds, Sampling
from pretrain.model import LanguageModel

Method = Sampling | Beams
"""Drawn, or searched for."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One text that was generated.

    Attributes:
        prompt: What was asked.
        text: The new text, the prompt not included.
        num_tokens: Its tokens, the end not counted.
        score: That of `Continuation`.
    """

    prompt: str
    text: str
    num_tokens: int
    score: float


def generate_text(
    model: LanguageModel,
    codec: Codec,
    prompts: Iterable[str],
    constraints: Constraints,
    method: Method,
    *,
    seed: int = 0,
    batch_size: int = 16,
) -> Iterator[list[Answer]]:
    """Yields for each prompt, in order, its texts, the best first; one where they are drawn.

    Args:
        model: A model with a decoder.
        codec: Its tokenizer.
        prompts: Texts; read a batch at a time. An empty one is the beginning of a document to a decoder.
        constraints: What may come, and where it ends: `eos_ids` are those of the codec, if they are to end a text.
        method: How to choose.
        seed: Of the draws; the same seed gives a prompt the same text in whatever batch it comes (`RowSeeds`).
        batch_size: Prompts that are decoded together. Memory grows with it.

    Raises:
        ConfigError: The model cannot generate, or a prompt does not fit it; names its number, from 1.
    """
    check_prompts(model, [])
    remaining, number, row_seeds = iter(prompts), 0, RowSeeds(seed)
    while batch := list(islice(remaining, batch_size)):
        rows = []
        for prompt in batch:
            number += 1
            rows.append(encode_prompt(model, codec, prompt, where=f"prompt {number}"))
        if isinstance(method, Beams):
            found = beam_search(model, rows, constraints, method)
        else:
            seeds = [row_seeds(row) for row in rows]
            found = [[one] for one in generate(model, rows, constraints, method, seed=seeds)]
        for prompt, row, continuations in zip(batch, rows, found, strict=True):
            yield [_answer(model, codec, prompt, row, one) for one in continuations]


def _answer(model: LanguageModel, codec: Codec, prompt: str, ids: list[int], found: Continuation) -> Answer:
    text = text_after(codec, _context(model, ids), found.tokens)
    return Answer(prompt, text, len(found.tokens), found.score)


def stream_text(
    model: LanguageModel,
    codec: Codec,
    prompt: str,
    constraints: Constraints,
    sampling: Sampling,
    *,
    seed: int = 0,
) -> Iterator[str]:
    """Yields the new text of one prompt in pieces, as its tokens are drawn: that of `generate_text`, whole characters.

    Raises:
        ConfigError: The model cannot generate, or the prompt does not fit it.
    """
    check_prompts(model, [])
    ids = encode_prompt(model, codec, prompt)
    text = Detokenizer(codec, _context(model, ids))
    for ((_, token, _, ends),) in stream(model, [ids], constraints, sampling, seed=seed):
        if not ends and (piece := text.add(token)):
            yield piece
    if piece := text.rest():
        yield piece


def encode_prompt(model: LanguageModel, codec: Codec, prompt: str, *, where: str = "") -> list[int]:
    """Returns the ids of a prompt, for a decoder at least the one that begins a document.

    Raises:
        ConfigError: The prompt does not fit the model, or is empty where no token begins a document.
    """
    ids = codec.encode(prompt)
    if not ids and model.encoder is None:
        bos = model.special_tokens.bos
        ids = list(codec.eos_ids[:1]) if bos is None else [bos]
        if not ids:
            raise ConfigError(
                "the prompt is empty, and the tokenizer has no end-of-text token", where=where, fix="give a text"
            )
    check_prompt(model, ids, where=where)
    return ids


def _context(model: LanguageModel, ids: list[int]) -> list[int]:
    """What the new text follows: the prompt of a decoder; an answer stands alone."""
    return ids if model.encoder is None else []
