"""`pretrain generate`: prompts in, lines out; an encoder fills the masks of a text.

one prompt, drawn or greedy     the text as it comes, after the prompt if it continues it
one prompt, beams               the text
--chat                          the answer to a turn of the user, without the turn
--image                         the caption of each image
several prompts                 a line each, in order: a batch at a time; line breaks become \\n
several texts a prompt          a line each: score, tab, text
--json                          an object a line
an encoder                      the text with its masks filled, and a line of candidates a mask
"""

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from typing import TextIO

import torch

from pretrain.errors import ConfigError
from pretrain.generation.beam import Beams
from pretrain.generation.chat import ChatCodec, trimmed
from pretrain.generation.constraints import Codec, Constraints
from pretrain.generation.generation_options import Options
from pretrain.generation.incremental_decoder import check_prompt
from pretrain.generation.sampling import Sampling
from pretrain.generation.text import (
    GeneratedText,
    ImageCodec,
    generate_text,
    stream_text,
    text_after,
)
from pretrain.model import LanguageModel
from pretrain.types import Batch, GenerationDefaults

MASK = "[MASK]"
"""Spelling of the mask token that every tokenizer accepts."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token for a mask, with its probability while the other masks are not filled."""

    token: str
    id: int
    probability: float


@dataclass(frozen=True, slots=True)
class FilledText:
    """A prompt, its text with the best candidates, and all candidates of each mask."""

    prompt: str
    text: str
    masks: list[list[Candidate]]


@torch.no_grad()
def fill_masks(model: LanguageModel, codec: Codec, text: str, top_k: int = 5, *, where: str = "") -> FilledText:
    """Fills every mask of a text independently, in one forward.

    Masks are spelled `[MASK]` or as the tokenizer's own token; each gets `top_k` candidates.
    `where` names the text in errors. The model's mode is restored.

    Raises:
        ConfigError: The model fills no masks, the tokenizer has no mask token, the text has none or
            is too long.
    """
    if model.is_causal or model.head is None or not model.head.scores_ids:
        kind = "with a decoder" if model.is_causal else "without a language model's head"
        fix = "use one of an encoder with such a head"
        if model.head is not None and model.head.scores_labels:
            fix = "label texts with `pretrain classify`"
        raise ConfigError(f"a model {kind} fills no masks", where=where, fix=fix)
    if codec.mask_id is None:
        raise ConfigError(
            "the tokenizer has no mask token",
            where=where,
            fix="use the model's own tokenizer",
        )
    if top_k < 1:
        raise ConfigError(f"top_k={top_k} must be at least 1", where=where, fix="use 5 or so")
    (mask,) = codec.tokens([codec.mask_id])
    ids = codec.encode(text.replace(MASK, mask))
    places = [place for place, token in enumerate(ids) if token == codec.mask_id]
    if not places:
        raise ConfigError(
            "the text has no mask",
            where=where,
            fix=f"put {MASK} where a word is to be filled in",
        )
    check_prompt(model, ids, where=where)
    tokens_BT = torch.tensor([ids], device=model.embedding.weight.device)
    was_training = model.training
    model.eval()
    try:
        hidden_BTD = model(Batch(tokens_BT, tokens_BT), logits=False).hidden_BTD
        scores_PV = model.head(hidden_BTD[0, places]).float()
    finally:
        model.train(was_training)
    best = scores_PV.softmax(dim=-1).topk(min(top_k, model.vocab_size))
    masks = []
    for place, numbers, values in zip(places, best.indices.tolist(), best.values.tolist(), strict=True):
        masks.append(list(map(Candidate, codec.tokens(numbers), numbers, values)))
        ids[place] = numbers[0]
    return FilledText(text, _spell_filled(codec, ids, places), masks)


def _spell_filled(codec: Codec, ids: list[int], places: list[int]) -> str:
    text, begin = "", 0
    hidden = [place for place in places if not codec.decode([ids[place]])]
    for end in [*hidden, len(ids)]:
        part = text_after(codec, ids[:begin], ids[begin:end])
        text += " " * (begin > 0 and part[:1].isalnum()) + part
        if end < len(ids):
            text += " " * (text[-1:].strip() != "") + codec.tokens([ids[end]])[0]
            begin = end + 1
    return text


def run_generate(
    model: LanguageModel,
    codec: Codec | ImageCodec,
    defaults: GenerationDefaults,
    options: Options,
    prompts: Iterator[str] | None,
    out: TextIO,
    *,
    seed: int = 0,
    batch_size: int = 16,
    as_json: bool = False,
    finish: Callable[[str], str] | None = None,
) -> int:
    """Generates for each prompt, and writes the texts, flushed with each prompt or piece of text.

    Returns the number of texts without a visible character. `prompts=None`: none were given, and a
    decoder begins a document. `finish` changes a translation when it is whole. Raises:
    ConfigError, where the model, a prompt or an option does not fit.
    """
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="backslashreplace")  # the terminal may lack a character
    if not model.is_causal and not isinstance(codec, ImageCodec):
        top_k = options.candidates()
        texts = _needed(prompts, f"give --prompt, with {MASK} in it")
        for number, prompt in enumerate(texts, start=1):
            filled = fill_masks(model, codec, prompt, top_k, where=f"prompt {number}")
            _write(out, _filled_lines(filled, as_json))
        return 0
    constraints = options.constraints(model, codec, defaults)
    method = options.method(model, defaults)
    asked = _asked(model, codec, prompts)
    first = list(islice(asked, 2))
    alone = len(first) == 1
    if alone and isinstance(method, Sampling) and not as_json and finish is None:
        return int(not _stream(model, codec, first[0], constraints, method, out, seed))
    asked = chain(first, asked)
    repeats = _repeats(model, codec)
    scored = isinstance(method, Beams) and method.num_return > 1
    num_blank = 0
    for answers in generate_text(model, codec, asked, constraints, method, seed=seed, batch_size=batch_size):
        answers = [_finished(codec, answer, finish) for answer in answers]
        num_blank += sum(not answer.text.strip() for answer in answers)
        _write(out, [_line(answer, as_json, repeats, alone, scored) for answer in answers])
    return num_blank


def _asked(model: LanguageModel, codec: Codec | ImageCodec, prompts: Iterator[str] | None) -> Iterator[str]:
    if isinstance(codec, ImageCodec):
        return _needed(prompts, "give --image")
    if model.encoder is not None:
        return _needed(prompts, "give --prompt, --file, or pipe a text in")
    return iter([""]) if prompts is None else prompts


def _repeats(model: LanguageModel, codec: Codec | ImageCodec) -> bool:
    """Returns whether a text is written after its prompt, which it continues."""
    return model.encoder is None and not isinstance(codec, ChatCodec)


def _needed(prompts: Iterator[str] | None, fix: str) -> Iterator[str]:
    if prompts is None:
        raise ConfigError("there is no prompt", fix=fix)
    return prompts


def _finished(codec: Codec | ImageCodec, answer: GeneratedText, finish: Callable[[str], str] | None) -> GeneratedText:
    text = answer.text.strip() if isinstance(codec, ChatCodec) else answer.text
    return replace(answer, text=text if finish is None else finish(text))


def _line(answer: GeneratedText, as_json: bool, repeats: bool, alone: bool, scored: bool) -> str:
    if as_json:
        facts = {"prompt": answer.prompt, "text": answer.text, "tokens": answer.num_tokens}
        return json.dumps(facts | {"score": answer.score}, ensure_ascii=False)
    text = answer.prompt + answer.text if repeats else answer.text
    if scored or not alone:
        text = text.replace("\r", "\\r").replace("\n", "\\n")
    return f"{answer.score:.4f}\t{text}" if scored else text


def _stream(
    model: LanguageModel,
    codec: Codec | ImageCodec,
    prompt: str,
    constraints: Constraints,
    sampling: Sampling,
    out: TextIO,
    seed: int,
) -> bool:
    """Writes a text as it comes; returns whether a character of it is visible."""
    pieces = stream_text(model, codec, prompt, constraints, sampling, seed=seed)
    if isinstance(codec, ChatCodec):
        pieces = trimmed(pieces)
    # A refused prompt leaves no output: the first piece is drawn before the prompt is repeated.
    first = next(pieces, "")
    is_visible = bool(first.strip())
    out.write(prompt + first if _repeats(model, codec) else first)
    out.flush()
    try:
        for piece in pieces:
            is_visible = is_visible or bool(piece.strip())
            out.write(piece)
            out.flush()
    finally:  # an interrupted text ends its line too
        _write(out, [""])
    return is_visible


def _filled_lines(filled: FilledText, as_json: bool) -> list[str]:
    if as_json:
        return [json.dumps(asdict(filled), ensure_ascii=False)]
    lines = [filled.text]
    for number, candidates in enumerate(filled.masks, start=1):
        shown = "  ".join(f"{token.token} {token.probability:.3f}" for token in candidates)
        lines.append(f"  mask {number}: {shown}")
    return lines


def _write(out: TextIO, lines: list[str]) -> None:
    out.write("".join(f"{line}\n" for line in lines))
    out.flush()
