"""`pretrain attention`: from a text to the maps of the requested heads, drawn and in numbers.

text -> tokens -> one batch -> record_attention -> choose_heads -> picture, facts
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from pretrain.artifact import Artifact
from pretrain.attention_maps.figure import build_sections, draw_attention, spell_tokens
from pretrain.attention_maps.figure_layout import MAX_TOKENS
from pretrain.attention_maps.maps import choose_heads, parse_numbers, record_attention, summarize_head
from pretrain.errors import ConfigError
from pretrain.generation.constraints import Codec
from pretrain.generation.generation_options import Options
from pretrain.generation.incremental_decoder import check_prompt
from pretrain.generation.sampling import generate
from pretrain.model import LanguageModel
from pretrain.tracking.picture_files import check_format
from pretrain.types import Batch, StackRows


@dataclass(frozen=True, slots=True)
class AttentionRequest:
    """Options of `pretrain attention`. Raises: ConfigError: Text that is not UTF-8, unknown format."""

    text: str  # input of the only stack, or of the encoder of two
    target: str | None = None  # of the decoder, after its start token; None: the greedy answer
    kind: str | None = None  # one of `KINDS`; None: `cross` where there is any, else `self`
    layers: str = "all"  # or numbers from 0 with commas between
    heads: str = "all"  # the same
    out: Path | None = None  # picture to write

    def __post_init__(self) -> None:
        for name, text in (("--text", self.text), ("--target", self.target or "")):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ConfigError("not UTF-8", where=name, fix="check the terminal's encoding") from None
        if self.out is not None:
            check_format(self.out)


def see_attention(artifact: Artifact, request: AttentionRequest) -> dict[str, Any]:
    """Draws the requested maps; returns tokens of each stack, a summary of each head, and the path.

    Raises:
        ConfigError: A text that is empty or too long, or a head that there is not.
        DiskError: The picture cannot be written.
    """
    ids = _read_text(artifact, request)
    tokens = {stack: spell_tokens(artifact.codec, numbers) for stack, numbers in ids.items()}
    maps = record_attention(artifact.model, build_row(ids, artifact.model))
    layers, heads = parse_numbers(request.layers, "layer"), parse_numbers(request.heads, "head")
    rows = choose_heads(maps, request.kind, layers, heads)
    if request.out is not None:
        draw_attention(build_sections(rows, tokens), request.out)
    summaries = []
    for head in chain.from_iterable(rows):
        keys = tokens["encoder" if head.kind == "cross" else head.stack]
        summaries.append(summarize_head(head, keys))
    out = None if request.out is None else str(request.out)
    return {"tokens": tokens, "heads": summaries, "out": out}


def _read_text(artifact: Artifact, request: AttentionRequest) -> dict[str, list[int]]:
    """Returns the ids that each stack reads."""
    model, codec = artifact.model, artifact.codec
    if request.target is not None or model.encoder is None or model.decoder is None:
        return encode_texts(model, codec, request.text, request.target)
    text = codec.encode(request.text)
    _check(text, model, "--text")
    start = _start_of(model)
    most = min(2 * len(text) + 8, MAX_TOKENS - 1, model.max_seq_len - 1)
    constraints = Options(max_tokens=most).constraints(model, codec, artifact.generation)
    target = [start, *generate(model, [text], constraints)[0].tokens]
    _check(target, model, "--target")
    return {"encoder": text, "decoder": target}


def encode_texts(
    model: LanguageModel,
    codec: Codec,
    text: str,
    target: str | None,
    *,
    options: tuple[str, str] = ("--text", "--target"),
) -> dict[str, list[int]]:
    """Returns the ids that each stack reads, by its name.

    `target` is the input of the decoder of two stacks after its start token; None with one stack.
    Errors call text and target by the names in `options`.

    Raises:
        ConfigError: A text is empty or too long, or a target is not for this model.
    """
    ids = codec.encode(text)
    _check(ids, model, options[0])
    if model.encoder is None or model.decoder is None:
        if target is not None:
            raise ConfigError(
                f"{options[1]} is for models of two stacks",
                fix=f"leave it out, or put it behind {options[0]}",
            )
        return {"decoder" if model.encoder is None else "encoder": ids}
    start = _start_of(model)
    assert target is not None, "the decoder of two stacks reads something"
    read = codec.encode_target(target)
    # The end of a text is only ever an output.
    read = read[:-1] if read and read[-1] in codec.eos_ids else read
    _check([start, *read], model, options[1])
    return {"encoder": ids, "decoder": [start, *read]}


def _start_of(model: LanguageModel) -> int:
    """Returns the first input of a decoder of two stacks. Raises: ConfigError: It is not known."""
    if model.special_tokens.start is None:
        raise ConfigError("the decoder's first token is not known", fix="set model.special_tokens.start")
    return model.special_tokens.start


def _check(ids: Sequence[int], model: LanguageModel, where: str) -> None:
    check_prompt(model, ids, where=where)
    if len(ids) > MAX_TOKENS:
        raise ConfigError(
            f"{len(ids)} tokens cannot be read in one picture, at most {MAX_TOKENS} can",
            where=where,
            fix="shorten it",
        )


def build_row(ids: dict[str, list[int]], model: LanguageModel) -> Batch:
    """Returns the output of `encode_texts` as a batch of one row, on the model's device."""
    device = model.embedding.weight.device
    rows = {stack: torch.tensor([numbers], device=device) for stack, numbers in ids.items()}
    if len(rows) == 2:
        return Batch(rows["decoder"], rows["decoder"], source=StackRows(rows["encoder"]))
    (tokens_BT,) = rows.values()
    return Batch(tokens_BT, tokens_BT)
