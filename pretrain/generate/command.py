"""Filling masks: what a masked language model puts where a text has a mask token."""

import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import TextIO

import torch

from pretrain.errors import ConfigError
from pretrain.generate.beam import Beams
from pretrain.generate.constraints import Codec, Constraints
from pretrain.generate.generation_options import Defaults, Options
from pretrain.generate.incremental_decoder import check_prompt
from pretrain.generate.sampling import Sampling
from pretrain.generate.text import GeneratedText, generate_text, stream_text
from pretrain.model import LanguageModel
from pretrain.types import Batch

MASK = "[MASK]"

"""May stand in a text for the mask token of whatever tokenizer."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token for a mask.

    Attributes:
        token: Text of the token, as displayed by the codec.
        id: Token id.
        probability: Under the model, by itself: other masks are masks still.
    """

    token: str
    id: int
    probability: float


@dataclass(frozen=True, slots=True)
class FilledText:
    """A text with its masks filled.

    Attributes:
        prompt: The text that was given.
        text: With the best candidate of each mask.
        masks: The candidates of each mask in order, the best first.
    """

    prompt: str
    text: str
    masks: list[list[Candidate]]


def fill_masks(model: LanguageModel, codec: Codec, text: str, top_k: int = 5, *, where: str = "") -> FilledText:
    """Fills every mask of a text, each by itself, in one forward.

    Args:
        model: An encoder with a language model's head; run in eval mode, and left in the mode that it was in.
        codec: Tokenizer of the model.
        text: With one mask or more, as `[MASK]` or as the tokenizer's own mask token.
        top_k: Candidates of each mask.
        where: Which text it is, for errors.

    Raises:
        ConfigError: The model does not fill masks, the tokenizer has no mask token, the text has none or is too long.
    """
    if model.is_causal or model.head is None or model.head.scores_labels:
        kind = "a model with a decoder" if model.is_causal else "a model without a language model's head"
        raise ConfigError(f"{kind} fills no masks", where=where, fix="use one of an encoder with such a head")
    if codec.mask_id is None:
        raise ConfigError("the tokenizer has no mask token", where=where, fix="use the model's own tokenizer")
    if top_k < 1:
        raise ConfigError(f"top_k={top_k} must be at least 1", where=where, fix="use 5 or so")
    (mask,) = codec.tokens([codec.mask_id])
    ids = codec.encode(text.replace(MASK, mask))
    places = [place for place, token in enumerate(ids) if token == codec.mask_id]
    if not places:
        raise ConfigError("the text has no mask", where=where, fix=f"put {MASK} where a word is to be filled in")
    check_prompt(model, ids, where=where)
    masks = [_candidates(codec, row) for row in _best(model, ids, places, min(top_k, model.vocab_size))]
    best = dict(zip(places, (candidates[0].id for candidates in masks), strict=True))
    return FilledText(text, codec.decode([best.get(place, token) for place, token in enumerate(ids)]), masks)


def _candidates(codec: Codec, best: list[tuple[int, float]]) -> list[Candidate]:
    tokens = codec.tokens([number for number, _ in best])
    return [Candidate(token, number, value) for token, (number, value) in zip(tokens, best, strict=True)]


@torch.no_grad()
def _best(model: LanguageModel, ids: list[int], places: list[int], top_k: int) -> list[list[tuple[int, float]]]:
    """Returns (id, probability) of the best tokens at each place."""
    assert model.head is not None
    tokens_BT, was_training = torch.tensor([ids], device=model.embedding.weight.device), model.training
    model.eval()
    try:
        hidden_BTD = model(Batch(tokens_BT, tokens_BT), logits=False).hidden_BTD
        best = model.head(hidden_BTD[0, places]).float().softmax(dim=-1).topk(top_k)
    finally:
        model.train(was_training)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [list(zip(numbers, values, strict=True)) for numbers, values in pairs]


# `pretrain generate`: prompts in, lines out.
#
# one prompt, drawn or greedy     the text as it comes, after the prompt if it continues it
# one prompt, beams               the text
# several prompts                 a line each, in order: a batch at a time; line breaks within a text become \n
# several texts a prompt          a line each: score, tab, text
# --json                          an object a line
# an encoder                      the text with its masks filled, and a line of candidates for each mask


def run_generate(
    model: LanguageModel,
    codec: Codec,
    defaults: Defaults,
    options: Options,
    prompts: Iterator[str] | None,
    out: TextIO,
    *,
    seed: int = 0,
    batch_size: int = 16,
    as_json: bool = False,
) -> None:
    """Generates for each prompt, and writes what comes.

    Args:
        model: Any model with a language model's head.
        codec: Tokenizer of the model.
        defaults: How its makers generate.
        options: What the command line says.
        prompts: None: none were given; a decoder then begins a document.
        out: Written to, and flushed with each prompt or piece of text.
        seed: Seed of sampling.
        batch_size: Prompts that are decoded together.
        as_json: Write an object a line.

    Raises:
        ConfigError: A model or a prompt that does not allow it, or options that do not.
    """
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character is no reason to stop
    if not model.is_causal:
        top_k = options.candidates()
        for number, prompt in enumerate(_needed(prompts, f"give --prompt, with {MASK} in it"), start=1):
            _write(out, _filled_lines(fill_masks(model, codec, prompt, top_k, where=f"prompt {number}"), as_json))
        return
    constraints, method = options.constraints(model, codec, defaults), options.method(model, defaults)
    if model.encoder is not None:
        prompts = _needed(prompts, "give --prompt, --file, or pipe a text in")
    remaining = iter([""]) if prompts is None else prompts
    first = list(islice(remaining, 2))
    alone = len(first) == 1
    if alone and isinstance(method, Sampling) and not as_json:
        _stream(model, codec, first[0], constraints, method, out, seed)
        return
    answers = generate_text(
        model, codec, chain(first, remaining), constraints, method, seed=seed, batch_size=batch_size
    )
    continues, scored = model.encoder is None, isinstance(method, Beams) and method.num_return > 1
    for texts in answers:
        if as_json:
            _write(out, [_to_json(answer) for answer in texts])
        else:
            _write(out, [_line(answer, continues, scored=scored, whole=alone and not scored) for answer in texts])


def _needed(prompts: Iterator[str] | None, fix: str) -> Iterator[str]:
    if prompts is None:
        raise ConfigError("there is no prompt", fix=fix)
    return prompts


def _stream(
    model: LanguageModel,
    codec: Codec,
    prompt: str,
    constraints: Constraints,
    sampling: Sampling,
    out: TextIO,
    seed: int,
) -> None:
    pieces = stream_text(model, codec, prompt, constraints, sampling, seed=seed)
    # The first piece comes before the prompt is repeated: a prompt that is refused must leave no output.
    first = next(pieces, "")
    out.write(prompt + first if model.encoder is None else first)
    out.flush()
    try:
        for piece in pieces:
            out.write(piece)
            out.flush()
    finally:  # an interrupted text ends its line too
        _write(out, [""])


def _line(answer: GeneratedText, continues: bool, *, scored: bool, whole: bool) -> str:
    text = answer.prompt + answer.text if continues else answer.text
    if not whole:
        text = text.replace("\r", "\\r").replace("\n", "\\n")
    return f"{answer.score:.4f}\t{text}" if scored else text


def _to_json(answer: GeneratedText) -> str:
    facts = {"prompt": answer.prompt, "text": answer.text, "tokens": answer.num_tokens, "score": answer.score}
    return json.dumps(facts, ensure_ascii=False)


def _filled_lines(filled: FilledText, as_json: bool) -> list[str]:
    if as_json:
        return [json.dumps(asdict(filled), ensure_ascii=False)]
    lines = [filled.text]
    for number, candidates in enumerate(filled.masks, start=1):
        shown = "  ".join(f"{found.token} {found.probability:.3f}" for found in candidates)
        lines.append(f"  mask {number}: {shown}")
    return lines


def _write(out: TextIO, lines: list[str]) -> None:
    out.write("".join(f"{line}\n" for line in lines))
    out.flush()
