"""Texts of a test set: one a line, plain or gzip."""

import gzip
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import ConfigError, DataError
from pretrain.evaluate.distributed import collect, current, deal
from pretrain.generate.beam import Beams, beam_search
from pretrain.generate.constraints import Codec, Constraints
from pretrain.generate.incremental_decoder import check_prompt, check_prompts
from pretrain.generate.sampling import generate
from pretrain.generate.text import Method
from pretrain.model import Transformer
from pretrain.utils.io import write_file
from pretrain.utils.log import stderr_console


def read_texts(file: Path) -> list[str]:
    """Returns the lines of a UTF-8 file, empty ones too, without what ends them.

    Only line feeds divide lines: a text may hold the other characters that Unicode takes for the end of one.

    Raises:
        ConfigError: It cannot be read.
        DataError: It is empty, damaged, or not UTF-8; names the line.
    """
    try:
        content = file.read_bytes()
        if file.suffix == ".gz":
            content = gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"truncated or damaged gzip: {error}", where=str(file), fix="copy it again") from None
    except OSError as error:
        raise ConfigError(f"cannot read it: {error.strerror}", where=str(file), fix="check the path") from None
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    if not lines:
        raise DataError("holds no line", where=str(file), fix="give one text a line")
    return [_decode(line, file, number) for number, line in enumerate(lines, start=1)]


def _decode(line: bytes, file: Path, number: int) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8: byte {line[error.start]:#04x}", where=f"{file}:{number}", fix="convert it"
        ) from None


def read_parallel(source: Path, reference: Path) -> tuple[list[str], list[str]]:
    """Returns sources and references. Raises: as `read_texts`; DataError where they are not as many."""
    sources, references = read_texts(source), read_texts(reference)
    if len(sources) != len(references):
        raise DataError(
            f"has {len(references)} lines, {source} has {len(sources)}",
            where=str(reference),
            fix="give files whose lines belong together",
        )
    return sources, references


def write_texts(file: Path, texts: list[str]) -> None:
    """Writes one text a line; line breaks within one become spaces. Raises: DiskError."""
    lines = (" ".join(text.splitlines()) for text in texts)
    write_file(file, "".join(f"{line}\n" for line in lines).encode("utf-8", errors="replace"))


# A test set through a translator: sentences of similar length together, so that little is padding.
#
# sources -> ids, by length -> batches of at most so many tokens over all beams -> dealt out to the ranks -> decoded
#         -> texts in the order they came, on every rank


BATCH_TOKENS = 8192

"""Source tokens of a batch, padding and beams counted: cores are busy, and caches of small models below 100 MiB."""


@dataclass(frozen=True, slots=True)
class Translations:
    """What became of a test set.

    Attributes:
        texts: In the order of the sources.
        num_tokens: Generated, those that end a text not counted.
        num_cut: Texts that were ended by their length.
        seconds: Time of decoding.
    """

    texts: list[str]
    num_tokens: int
    num_cut: int
    seconds: float


def encode_sources(model: Transformer, codec: Codec, texts: Sequence[str], where: str) -> list[list[int]]:
    """Returns what the encoder reads of each text: its tokens and, as in training, the one that ends a document.

    Raises:
        ConfigError: The model does not translate, or a text is too long for it; names the line.
    """
    check_prompts(model, [])
    if model.encoder is None:
        raise ConfigError(
            "--source is for models with an encoder and a decoder; this one has a decoder alone",
            fix="give --data, for its loss",
        )
    found = [codec.encode(text) for text in texts]
    end = list(codec.eos_ids[:1])
    rows = [ids if not end or end[0] in ids else [*ids, *end] for ids in found]
    for number, row in enumerate(rows, start=1):
        check_prompt(model, row, where=f"{where}:{number}")
    return rows


def translate(
    model: Transformer,
    codec: Codec,
    sources: Sequence[Sequence[int]],
    constraints: Constraints,
    method: Method,
    *,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    label: str = "",
) -> Translations:
    """Decodes every source. Collective. The texts do not depend on `batch_tokens`, up to rounding.

    Args:
        model: With an encoder and a decoder.
        codec: Tokenizer of the model.
        sources: Result of `encode_sources`.
        constraints: What may come, and where it ends.
        method: How to choose.
        seed: Seed of sampling.
        batch_tokens: Source tokens that are decoded together, times the beams; at least one sentence.
        label: What a progress bar calls it.
    """
    started = time.monotonic()
    width = method.num_beams if isinstance(method, Beams) else 1
    batches = list(plan_batches(sources, batch_tokens // width))
    found: dict[int, tuple[list[int], bool]] = {}
    for rows in _shown([batches[number] for number in deal(len(batches))], label):
        batch = [sources[row] for row in rows]
        if isinstance(method, Beams):
            best = [one[0] for one in beam_search(model, batch, constraints, method)]
        else:
            best = generate(model, batch, constraints, method, seed=seed)
        found |= {row: (one.tokens, one.ended) for row, one in zip(rows, best, strict=True)}
    done = collect(found, len(sources))
    return Translations(
        texts=[codec.decode(tokens) for tokens, _ in done],
        num_tokens=sum(len(tokens) for tokens, _ in done),
        num_cut=sum(not ended for _, ended in done),
        seconds=time.monotonic() - started,
    )


def plan_batches(sources: Sequence[Sequence[int]], batch_tokens: int) -> Iterator[list[int]]:
    """Yields the rows of each batch, the longest first: what does not fit into memory is known at once."""
    batch: list[int] = []
    for row in sorted(range(len(sources)), key=lambda row: -len(sources[row])):
        # The first of a batch is its longest.
        if batch and len(sources[batch[0]]) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _shown(batches: list[list[int]], label: str) -> Iterator[list[int]]:
    """Passes the batches on, and draws a bar on a terminal."""
    from rich.progress import track

    console = stderr_console()
    is_shown = console.is_terminal and current()[0] == 0
    yield from track(batches, label, console=console, transient=True, disable=not is_shown)
