"""A test set through a translator: sentences of similar length together, so that little is padding.

sources -> ids, by length -> batches of at most so many tokens over all beams -> dealt out to the ranks -> decoded
        -> texts in the order they came, on every rank
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pretrain.errors import ConfigError
from pretrain.evaluate.ranks import collect, current, deal
from pretrain.generate.beam import Beams, beam_search
from pretrain.generate.codec import Codec
from pretrain.generate.constraints import Constraints
from pretrain.generate.decode import generate
from pretrain.generate.incremental_decoder import check_prompt, check_prompts
from pretrain.generate.text import Method
from pretrain.model import Transformer
from pretrain.utils.log import stderr_console

BATCH_TOKENS = 8192
"""Source tokens of a batch, padding and beams counted: cores are busy, and caches of small models below 100 MiB."""


@dataclass(frozen=True, slots=True)
class Translations:
    """What became of a test set.

    Attributes:
        texts: In the order of the sources.
        num_tokens: Generated, those that end a text not counted.
        num_cut: Texts that were ended by their length.
        seconds: Of decoding.
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
        codec: Its tokenizer.
        sources: Of `encode_sources`.
        constraints: What may come, and where it ends.
        method: How to choose.
        seed: Of draws.
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
