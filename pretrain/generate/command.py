"""`pretrain generate`: prompts in, lines out.

one prompt, drawn or greedy     the text as it comes, after the prompt if it continues it
one prompt, beams               the text
several prompts                 a line each, in order: a batch at a time; line breaks within a text become \\n
several texts a prompt          a line each: score, tab, text
--json                          an object a line
an encoder                      the text with its masks filled, and a line of candidates for each mask
"""

import io
import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain, islice
from typing import TextIO

from pretrain.errors import ConfigError
from pretrain.generate.beam import Beams
from pretrain.generate.codec import Codec
from pretrain.generate.constraints import Constraints
from pretrain.generate.fill import MASK, Filled, fill_masks
from pretrain.generate.options import Defaults, Options
from pretrain.generate.sampling import Sampling
from pretrain.generate.text import Answer, generate_text, stream_text
from pretrain.model import LanguageModel


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
        codec: Its tokenizer.
        defaults: How its makers generate.
        options: What the command line says.
        prompts: None: none were given; a decoder then begins a document.
        out: Written to, and flushed with each prompt or piece of text.
        seed: Of the draws.
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


def _line(answer: Answer, continues: bool, *, scored: bool, whole: bool) -> str:
    text = answer.prompt + answer.text if continues else answer.text
    if not whole:
        text = text.replace("\r", "\\r").replace("\n", "\\n")
    return f"{answer.score:.4f}\t{text}" if scored else text


def _to_json(answer: Answer) -> str:
    facts = {"prompt": answer.prompt, "text": answer.text, "tokens": answer.num_tokens, "score": answer.score}
    return json.dumps(facts, ensure_ascii=False)


def _filled_lines(filled: Filled, as_json: bool) -> list[str]:
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
