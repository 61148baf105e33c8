"""From prompts to new texts: prompts read and encoded, text given out in whole characters."""

import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from pretrain.config.data import ImagesConfig
from pretrain.config.load import load_config
from pretrain.config.model import ImageSize
from pretrain.data.image_view import read_view
from pretrain.errors import ConfigError, DataError
from pretrain.generation.beam import Beams, beam_search
from pretrain.generation.constraints import Codec, Constraints
from pretrain.generation.incremental_decoder import Prompt, check_prompt, check_prompts
from pretrain.generation.sampling import RowSeeds, Sampling, generate, stream
from pretrain.generation.stop_strings import StopFilter, StopStrings
from pretrain.model import LanguageModel, Transformer
from pretrain.preparation.readers.record_fields import RecordError, parse_object, text_of
from pretrain.run.folder import RunDir

_BROKEN = "\ufffd"


class Detokenizer:
    """Turns one token after another into text that continues the ids in `context`.

    The text of a token depends on its neighbours: a character may take several tokens, and a first
    word loses its space. So a token's text is the text that it adds to those just before it, and no
    piece ends within a character. All pieces together are the text of all tokens, unless the byte
    fallback of a sentencepiece model meets bytes that are no UTF-8. A token costs two calls of the
    codec with a few tokens; those before the first piece include the context.
    """

    def __init__(self, codec: "Codec | ImageCodec", context: Sequence[int] = ()) -> None:
        self._codec = codec
        self._ids = list(context)
        self._given = len(context)

    def add(self, token: int) -> str:
        """Returns the text that one more token completes, often empty."""
        self._ids.append(token)
        text = self._pending()
        if not text or text.endswith(_BROKEN):
            return ""
        # The last piece remains as the context of the next one.
        self._ids = self._ids[self._given :]
        self._given = len(self._ids)
        return text

    def rest(self) -> str:
        """Returns the remaining text, at the end: characters that never became complete."""
        text = self._pending()
        self._ids = []
        self._given = 0
        return text

    def _pending(self) -> str:
        return text_after(self._codec, self._ids[: self._given], self._ids[self._given :])


def text_after(codec: "Codec | ImageCodec", context: Sequence[int], ids: Sequence[int]) -> str:
    """Returns the text that `ids` add to `context`, at once."""
    before = codec.decode(list(context))
    return codec.decode([*context, *ids])[len(before) :]


class ImageCodec:
    """A codec whose prompts are the paths of images, seen as evaluation does: the centre."""

    def __init__(self, codec: Codec, size: ImageSize, config: ImagesConfig) -> None:
        self._size, self._config = size, config
        self.eos_ids = codec.eos_ids
        self.mask_id = codec.mask_id
        self.decode = codec.decode
        self.tokens = codec.tokens
        self.encode_rendered = codec.encode_rendered

    def encode(self, path: str) -> Tensor:
        """Returns the pixels of an image, uint8 [C, Y, X]. Raises: DataError."""
        return torch.from_numpy(read_view(Path(path), self._size, self._config).copy())


def open_images(model: LanguageModel, codec: Codec, run: RunDir | None) -> ImageCodec:
    """Returns the codec of images that a model captions; `run` is its run, if any.

    Raises: ConfigError: The model reads text.
    """
    patches = model.patches if isinstance(model, Transformer) else None
    if patches is None:
        raise ConfigError(
            "the model reads text, and --image is for models of captions",
            fix="use one whose objective is captions",
        )
    images = ImagesConfig()
    if run is not None:
        images = load_config(run.config, extensions="require").data.images
    return ImageCodec(codec, patches.image_size, images)


STDIN = "-"


def find_prompts(prompts: list[str], file: str | None, option: str = "--prompt") -> Iterator[str] | None:
    """Returns the prompts of the command line, a file or standard input; None: there are none.

    A file is opened at once and read lazily: one prompt a line, empty ones too, or in a `.jsonl` a
    record a line. Standard input is read where `file` is `-`, or by default where it is piped or
    redirected. `option` is the one of the command line: the name of a record's field, without `--`.

    Raises:
        ConfigError: Both were given, there is no such file, it is a `.json`, or a prompt is not UTF-8.
        DataError, as it is read: Not UTF-8, or a record without the field.
    """
    if prompts and file is not None:
        raise ConfigError(f"{option} and --file were both given", fix="give one of them")
    if prompts:
        try:
            "".join(prompts).encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{option} is not UTF-8",
                fix="put the text in a file, as UTF-8",
            ) from None
        return iter(prompts)
    if file == STDIN or (file is None and _is_piped()):
        return _read_lines(sys.stdin.buffer, "standard input")
    if file is None:
        return None
    if Path(file).suffix.lower() == ".json":
        raise ConfigError(
            "a .json is one list of records, and --file takes a text a line",
            where=file,
            fix="write a .jsonl, a record a line, or a text a line",
        )
    try:
        opened = Path(file).open("rb")  # noqa: SIM115 (closed by whom it is read)
    except OSError as error:
        raise ConfigError(
            f"cannot read it: {error.strerror}",
            where=file,
            fix="check the path of --file",
        ) from None
    lines = _read_lines(opened, file)
    return _read_records(lines, file, option.lstrip("-")) if Path(file).suffix.lower() == ".jsonl" else lines


def _is_piped() -> bool:
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
                    f"not UTF-8: byte {line[error.start]:#04x}",
                    where=f"{name}:{number}",
                    fix="convert it",
                ) from None
            yield text.rstrip("\r\n")


def _read_records(lines: Iterator[str], name: str, field: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = parse_object(line)
            text, _ = text_of(record, field if field in record else "text", f"the name {field} in each record")
        except RecordError as error:
            raise error.at(f"{name}:{number}") from None
        yield text


Method = Sampling | Beams


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """A new text without its prompt; tokens without the end token, the score of `Continuation`."""

    prompt: str
    text: str
    num_tokens: int
    score: float


def generate_text(
    model: LanguageModel,
    codec: Codec | ImageCodec,
    prompts: Iterable[str],
    constraints: Constraints,
    method: Method,
    *,
    seed: int = 0,
    batch_size: int = 16,
) -> Iterator[list[GeneratedText]]:
    """Yields the texts of each prompt in order: one of sampling, or several of beams, the best first.

    Prompts are read and decoded `batch_size` at a time; to a decoder an empty one is the beginning
    of a document. The text of a prompt does not depend on its batch (`RowSeeds`), and ends before
    the first of `stop_strings`, whose tokens count.

    Raises:
        ConfigError: The model cannot generate, or a prompt does not fit it; names its number, from
            1.
    """
    check_prompts(model, [])  # before the first prompt is read
    stops = StopStrings(codec.decode, constraints.stop_strings)
    remaining = iter(prompts)
    row_seeds = RowSeeds(seed)
    number = 0
    while batch := list(islice(remaining, batch_size)):
        rows = []
        for prompt in batch:
            number += 1
            rows.append(encode_prompt(model, codec, prompt, where=f"prompt {number}"))
        if isinstance(method, Beams):
            rows_of_texts = beam_search(model, rows, constraints, method, is_complete=stops.are_in)
        else:
            seeds = [row_seeds(row) for row in rows]
            ends = stops.are_in
            drawn = generate(model, rows, constraints, method, seed=seeds, is_complete=ends)
            rows_of_texts = [[one] for one in drawn]
        for prompt, row, continuations in zip(batch, rows, rows_of_texts, strict=True):
            context = context_of(model, row)
            texts = [stops.cut(text_after(codec, context, one.tokens)) for one in continuations]
            yield [
                GeneratedText(prompt, text, len(one.tokens), one.score)
                for text, one in zip(texts, continuations, strict=True)
            ]


def stream_text(
    model: LanguageModel,
    codec: Codec | ImageCodec,
    prompt: str,
    constraints: Constraints,
    sampling: Sampling,
    *,
    seed: int = 0,
) -> Iterator[str]:
    """Yields the text of `generate_text` for one prompt in pieces of whole characters.

    What may begin a stop string is held back until it is known not to.
    """
    check_prompts(model, [])
    ids = encode_prompt(model, codec, prompt)
    text = Detokenizer(codec, context_of(model, ids))
    stops = StopFilter(constraints.stop_strings)
    for ((_, token, _, ends),) in stream(model, [ids], constraints, sampling, seed=seed):
        if not ends and (piece := stops.add(text.add(token))):
            yield piece
        if stops.is_found:
            return
    if piece := stops.add(text.rest()) + stops.rest():
        yield piece


def context_of(model: LanguageModel, prompt: Prompt) -> list[int]:
    """Returns the ids on which the text after a prompt depends; an answer stands alone."""
    return [] if isinstance(prompt, Tensor) or model.encoder is not None else list(prompt)


def encode_prompt(model: LanguageModel, codec: Codec | ImageCodec, prompt: str, *, where: str = "") -> Prompt:
    """Returns the ids of a prompt, or the pixels of an image.

    For a decoder at least the token that begins a document.

    Raises ConfigError where the prompt does not fit the model, or is empty and nothing begins a
    text.
    """
    ids = codec.encode(prompt)
    if not isinstance(ids, Tensor) and not ids and model.encoder is None:
        bos = model.special_tokens.bos
        ids = list(codec.eos_ids[:1]) if bos is None else [bos]
        if not ids:
            raise ConfigError(
                "the prompt is empty, and the tokenizer has no end-of-text token",
                where=where,
                fix="give a text",
            )
    check_prompt(model, ids, where=where)
    return ids
