"""Text of tokens as they come, character by character and never a broken one."""

import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from pretrain.errors import ConfigError, DataError
from pretrain.generate.beam import Beams, beam_search
from pretrain.generate.constraints import Codec, Constraints
from pretrain.generate.incremental_decoder import check_prompt, check_prompts
from pretrain.generate.sampling import Continuation, RowSeeds, Sampling, generate, stream
from pretrain.model import LanguageModel

_BROKEN = "\ufffd"


class Detokenizer:
    """Turns one token after another into text.

    What a token stands for depends on its neighbours: a character may take several tokens, and a first word loses its
    space. So the text of a token is what it adds to the text of those just before it, and nothing is given out while it
    ends within a character. All pieces together are the text of all tokens, unless the byte fallback of a sentencepiece
    model meets bytes that are no UTF-8. A token costs two calls of the codec with a few tokens; before the first piece
    the context is among them.

    Args:
        codec: The tokenizer.
        context: Ids before the first, whose text is not given out.
    """

    def __init__(self, codec: Codec, context: Sequence[int] = ()) -> None:
        self._codec, self._ids, self._given = codec, list(context), len(context)

    def add(self, token: int) -> str:
        """Returns the text that is certain with one more token, often empty."""
        self._ids.append(token)
        text = self._pending()
        if not text or text.endswith(_BROKEN):
            return ""
        self._ids, self._given = self._ids[self._given :], len(self._ids) - self._given
        return text

    def rest(self) -> str:
        """Returns what was held back, at the end: characters that never became whole."""
        text = self._pending()
        self._ids, self._given = [], 0
        return text

    def _pending(self) -> str:
        before = self._codec.decode(self._ids[: self._given])
        return self._codec.decode(self._ids)[len(before) :]


def text_after(codec: Codec, context: Sequence[int], ids: Sequence[int]) -> str:
    """Returns the text that `ids` add to that of `context`: all that a `Detokenizer` gives out, at once."""
    before = codec.decode(list(context))
    return codec.decode([*context, *ids])[len(before) :]


# Prompts from the command line, a file or standard input.


STDIN = "-"


def find_prompts(prompts: list[str], file: str | None) -> Iterator[str] | None:
    """Returns the prompts that were given, or None where none were.

    A file is opened at once and read as it is needed: one prompt a line, empty ones too. Standard input is read where
    it was asked for, or, with nothing else given, where something is piped or redirected into it.

    Args:
        prompts: Those on the command line.
        file: A path, or `-` for standard input.

    Raises:
        ConfigError: Both were given, there is no such file, or a prompt is not UTF-8.
    """
    if prompts and file is not None:
        raise ConfigError("--prompt and --file were both given", fix="give one of them")
    if prompts:
        return iter([_check_argument(prompt) for prompt in prompts])
    if file == STDIN or (file is None and _is_piped()):
        return _read_lines(sys.stdin.buffer, "standard input")
    if file is None:
        return None
    try:
        opened = Path(file).open("rb")  # noqa: SIM115 (closed by whom it is read)
    except OSError as error:
        raise ConfigError(f"cannot read it: {error.strerror}", where=file, fix="check the path of --file") from None
    return _read_lines(opened, file)


def _check_argument(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ConfigError("--prompt is not UTF-8", fix="put the text in a file, as UTF-8") from None
    return prompt


def _is_piped() -> bool:
    """Whether something else than a terminal or /dev/null feeds standard input."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _read_lines(file: BinaryIO, name: str) -> Iterator[str]:
    with file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"not UTF-8: byte {line[error.start]:#04x}", where=f"{name}:{number}", fix="convert it"
                ) from None
            yield text.rstrip("\r\n")


# From prompt text to new text: a decoder continues it, an encoder-decoder answers it.


Method = Sampling | Beams

"""Drawn, or searched for."""


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """One text that was generated.

    Attributes:
        prompt: What was asked.
        text: The new text, the prompt not included.
        num_tokens: Number of tokens, without the end token.
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
) -> Iterator[list[GeneratedText]]:
    """Yields for each prompt, in order, its texts, the best first; one where they are drawn.

    Args:
        model: A model with a decoder.
        codec: Tokenizer of the model.
        prompts: Texts; read a batch at a time. An empty one is the beginning of a document to a decoder.
        constraints: What may come, and where it ends: `eos_ids` are those of the codec, if they are to end a text.
        method: How to choose.
        seed: Seed of sampling; the text of a prompt does not depend on its batch (`RowSeeds`).
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


def _answer(model: LanguageModel, codec: Codec, prompt: str, ids: list[int], found: Continuation) -> GeneratedText:
    text = text_after(codec, _context(model, ids), found.tokens)
    return GeneratedText(prompt, text, len(found.tokens), found.score)


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
