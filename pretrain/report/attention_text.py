"""`pretrain attention`: from a text to the maps of the heads that were asked for, drawn and in numbers.

text -> tokens -> one batch -> record_attention -> choose_heads -> picture, facts
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pretrain.artifact import Artifact
from pretrain.errors import ConfigError
from pretrain.generate import generate
from pretrain.generate.feed import check_prompt
from pretrain.generate.options import Options
from pretrain.model import Transformer
from pretrain.report.attention import choose_heads, record_attention, summarize_head
from pretrain.report.attention_figure import build_sections, check_format, draw_attention
from pretrain.report.attention_layout import MAX_TOKENS
from pretrain.report.token_labels import spell_tokens
from pretrain.types import Batch, Source


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be seen.

    Attributes:
        text: What the model reads; with two stacks, what its encoder reads.
        target: What the decoder of two stacks reads after its start token. None: what the model says to the text,
            greedily, at most twice as many tokens as the text has, and a few.
        kind: `self`, `cross`, `encoder`, `decoder`, or None: `cross` where there is any, else `self`.
        layers: `all`, or numbers from 0 with commas between.
        heads: The same.
        out: Picture to write: .png, .svg or .pdf. None: none.

    Raises:
        ConfigError: A text is not UTF-8, or the picture is of no known format.
    """

    text: str
    target: str | None = None
    kind: str | None = None
    layers: str = "all"
    heads: str = "all"
    out: Path | None = None

    def __post_init__(self) -> None:
        for name, text in (("--text", self.text), ("--target", self.target or "")):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ConfigError("not UTF-8", where=name, fix="check the terminal's encoding") from None
        if self.out is not None:
            check_format(self.out)


def see_attention(artifact: Artifact, request: Request) -> dict[str, Any]:
    """Draws what was asked for and returns the facts of it.

    Args:
        artifact: The model.
        request: Which maps of which text.

    Returns:
        `tokens`: those that each stack reads; `heads`: a summary of each; `out`: the picture, if there is one.

    Raises:
        ConfigError: A text that is empty or too long, or a head that there is not.
        DiskError: The picture cannot be written.
    """
    if not isinstance(artifact.model, Transformer):
        raise ConfigError("a recurrent model has no heads to draw", fix="give a Transformer")
    ids = _read_text(artifact, request)
    tokens = {stack: spell_tokens(artifact.codec, numbers) for stack, numbers in ids.items()}
    maps = record_attention(artifact.model, _build_batch(ids, artifact.model))
    rows = choose_heads(maps, request.kind, request.layers, request.heads)
    if request.out is not None:
        draw_attention(build_sections(rows, tokens), request.out)
    heads = [
        summarize_head(head, tokens["encoder" if head.kind == "cross" else head.stack]) for row in rows for head in row
    ]
    return {"tokens": tokens, "heads": heads, "out": None if request.out is None else str(request.out)}


def _read_text(artifact: Artifact, request: Request) -> dict[str, list[int]]:
    """Returns the ids that each stack reads."""
    model, codec = artifact.model, artifact.codec
    text = codec.encode(request.text)
    _check(text, model, "--text")
    if model.encoder is None or model.decoder is None:
        if request.target is not None:
            raise ConfigError("--target is for models of two stacks", fix="leave it out, or put it behind --text")
        return {"decoder" if model.encoder is None else "encoder": text}
    start = model.special_tokens.start
    if start is None:
        raise ConfigError("the decoder's first token is not known", fix="set model.special_tokens.start")
    if request.target is None:
        target = _answer(artifact, text)
    else:
        target = codec.encode_target(request.target)
        # What ends a text is only ever said, never read.
        target = target[:-1] if target and target[-1] in codec.eos_ids else target
    _check([start, *target], model, "--target")
    return {"encoder": text, "decoder": [start, *target]}


def _answer(artifact: Artifact, text: Sequence[int]) -> list[int]:
    """Returns what the model says to a source, greedily, without the end."""
    model = artifact.model
    most = min(2 * len(text) + 8, MAX_TOKENS - 1, model.max_seq_len - 1)
    constraints = Options(max_tokens=most).constraints(model, artifact.codec, artifact.generation)
    return generate(model, [text], constraints)[0].tokens


def _check(ids: Sequence[int], model: Transformer, where: str) -> None:
    check_prompt(model, ids, where=where)
    if len(ids) > MAX_TOKENS:
        raise ConfigError(
            f"{len(ids)} tokens cannot be read in one picture, at most {MAX_TOKENS} can", where=where, fix="shorten it"
        )


def _build_batch(ids: dict[str, list[int]], model: Transformer) -> Batch:
    rows = {stack: torch.tensor([numbers], device=model.embedding.weight.device) for stack, numbers in ids.items()}
    if len(rows) == 2:
        return Batch(rows["decoder"], rows["decoder"], source=Source(rows["encoder"]))
    (tokens_BT,) = rows.values()
    return Batch(tokens_BT, tokens_BT)
