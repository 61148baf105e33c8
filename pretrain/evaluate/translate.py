"""A test set through a translator: texts one a line, sentences of similar length decoded together.

sources -> ids, by length -> batches of at most `batch_tokens` over all beams -> dealt out to the ranks
        -> decoded -> texts in the order of the sources, on every rank
"""

import gzip
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import ConfigError, DataError
from pretrain.evaluate.distributed import collect, deal, with_bar
from pretrain.generate.beam import Beams, beam_search
from pretrain.generate.constraints import Codec, Constraints
from pretrain.generate.incremental_decoder import check_prompt, check_prompts
from pretrain.generate.sampling import generate
from pretrain.generate.text import Method
from pretrain.model import Transformer
from pretrain.utils.io import write_file

BATCH_TOKENS = 8192
"""Source tokens of a batch, with padding and beams: caches of small models stay below 100 MiB."""


def read_texts(file: Path) -> list[str]:
    """Returns the lines of a UTF-8 file, plain or gzip, empty ones too, without their ends.

    Only line feeds divide lines: a text may have other characters that Unicode calls line ends.

    Raises:
        ConfigError: The file cannot be read.
        DataError: It is empty, damaged, or not UTF-8; names the line.
    """
    try:
        content = file.read_bytes()
        if file.suffix == ".gz":
            content = gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        what = f"truncated or damaged gzip: {error}"
        raise DataError(what, where=str(file), fix="copy it again") from None
    except OSError as error:
        what = f"cannot read it: {error.strerror}"
        raise ConfigError(what, where=str(file), fix="check the path") from None
    if not content:
        raise DataError("holds no line", where=str(file), fix="give one text a line")
    found = []
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            what = f"not UTF-8: byte {line[error.start]:#04x}"
            raise DataError(what, where=f"{file}:{number}", fix="convert it") from None
        found.append(text.removesuffix("\r"))
    return found


def read_parallel(source: Path, reference: Path) -> tuple[list[str], list[str]]:
    """Returns sources and references. Raises: as `read_texts`; DataError: Their numbers differ."""
    sources = read_texts(source)
    references = read_texts(reference)
    if len(sources) != len(references):
        what = f"has {len(references)} lines, {source} has {len(sources)}"
        fix = "give files whose lines belong together"
        raise DataError(what, where=str(reference), fix=fix)
    return sources, references


def write_texts(file: Path, texts: list[str]) -> None:
    """Writes one text a line; line breaks within one become spaces. Raises: DiskError."""
    lines = (" ".join(text.splitlines()) for text in texts)
    write_file(file, "".join(f"{line}\n" for line in lines).encode("utf-8", errors="replace"))


@dataclass(frozen=True, slots=True)
class Translations:
    """The translations of a test set, in the order of the sources.

    `num_tokens` are without those that end a text, `num_cut` counts texts that their length ended,
    `seconds` is the time of decoding.
    """

    texts: list[str]
    num_tokens: int
    num_cut: int
    seconds: float


def encode_sources(model: Transformer, codec: Codec, texts: Sequence[str], where: str) -> list[list[int]]:
    """Returns the ids of each text and, as in training, of the token that ends a document.

    Raises:
        ConfigError: The model does not translate, or a text is too long for it; names the line.
    """
    check_prompts(model, [])
    if model.encoder is None:
        what = "--source is for models with an encoder and a decoder; this one has a decoder alone"
        raise ConfigError(what, fix="give --data, for its loss")
    end = codec.eos_ids[:1]
    rows = []
    for number, text in enumerate(texts, start=1):
        ids = codec.encode(text)
        # The codec of a release ends its texts itself.
        rows.append([*ids, *(token for token in end if token not in ids)])
        check_prompt(model, rows[-1], where=f"{where}:{number}")
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
    """Decodes every source, a result of `encode_sources`. Collective.

    A batch has `batch_tokens` source tokens, times the beams, and at least one sentence; the texts do
    not depend on it, up to rounding. `label` is that of the progress bar.
    """
    started = time.monotonic()
    width = method.num_beams if isinstance(method, Beams) else 1
    batches = list(plan_batches(sources, batch_tokens // width))
    found: dict[int, tuple[list[int], bool]] = {}
    mine = [batches[number] for number in deal(len(batches))]
    for rows in with_bar(mine, label, len(mine)):
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
    """Yields the rows of each batch, the longest first: a batch that exceeds memory fails at once."""
    batch: list[int] = []
    for row in sorted(range(len(sources)), key=lambda row: -len(sources[row])):
        # The first of a batch is its longest.
        if batch and len(sources[batch[0]]) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
