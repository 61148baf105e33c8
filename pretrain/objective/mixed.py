"""Mixtures of objectives, drawn by weight for each row from (seed, sample id). And UL2."""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np

from pretrain.config.lengths import RowLengths
from pretrain.kinds.objectives.ul2 import Ul2Config
from pretrain.objective.row_maker import RowContext
from pretrain.objective.seq2seq import start_of
from pretrain.objective.span import check_tokens, denoise
from pretrain.objective.token_kinds import TokenKind
from pretrain.rows import TokenRows, Vocabulary, merge_rows, move_places, select_rows
from pretrain.types import ModelRows, RowMaker, StackRowsT
from pretrain.utils.rng import draw_uniform


def mix(
    makers: Sequence[RowMaker], weights: Sequence[float], purpose: str, seed: int, lengths: RowLengths, fill: int
) -> RowMaker:
    """Returns a row maker that assigns each row to one of `makers`.

    Weights have any scale. `purpose` and `seed` are those of `draw_uniform`; rows shorter than
    `lengths` are padded with the token id `fill`.
    """
    if len(makers) == 1:
        return makers[0]

    def make(rows: TokenRows) -> ModelRows:
        assert rows.source is None, "objectives of pairs are not mixed"
        chosen = draw_parts(weights, purpose, seed, rows.sample_ids_B)
        found = np.unique(chosen).tolist()
        parts = [makers[kind](select_rows(rows, chosen == kind)) for kind in found]
        places = np.concatenate([np.flatnonzero(chosen == kind) for kind in found])
        return merge(parts, places, lengths, fill)

    return make


def draw_parts(weights: Sequence[float], purpose: str, seed: int, sample_ids: np.ndarray) -> np.ndarray:
    """Draws the part of a mixture for each row, int64 [B]; arguments as in `mix`."""
    bounds = np.cumsum(weights) / np.sum(weights)
    number = draw_uniform(purpose, seed, sample_ids, 1)[:, 0]
    return np.minimum(np.searchsorted(bounds, number, side="right"), len(weights) - 1)


def merge(parts: Sequence[ModelRows], places: np.ndarray, lengths: RowLengths, fill: int) -> ModelRows:
    """Puts the rows of all parts, one after another, at `places`, padded to the same length."""
    assert all(part.pairs is None for part in parts), "pairs of answers are not mixed"
    padded = []
    for part in parts:
        source = part.source
        if source is not None:
            assert lengths.source is not None
            source = _pad(source, lengths.source, fill)
        padded.append(replace(_pad(part, lengths.target, fill), source=source, num_padding=0))
    whole = merge_rows(padded, places)
    return replace(whole, num_padding=whole.num_tokens() - sum(part.num_tokens() for part in parts))


def _pad(rows: StackRowsT, length: int, fill: int) -> StackRowsT:
    """Lengthens rows by tokens `fill` of a document of their own, which no other token sees."""
    missing = length - rows.tokens_BT.shape[1]
    if not missing:
        return rows
    if rows.documents_BT is None:
        rows = replace(rows, documents_BT=np.zeros(rows.tokens_BT.shape, np.int32))
    if rows.positions_BT is None:
        rows = replace(rows, positions_BT=np.indices(rows.tokens_BT.shape)[1])
    padding = {one.name: one.metadata.get("padding", 0) for one in fields(rows)}
    padding["tokens_BT"] = fill
    changed: dict[str, Any] = move_places(rows, lambda row, column: row * length + column)
    for name, array in rows.along("BT").items():
        changed[name] = np.pad(array, ((0, 0), (0, missing)), constant_values=padding[name])
    return replace(rows, **changed)


# UL2: a mixture of denoisers, each marked by a mode token (Tay et al. 2023, 3.1).
#
#     R  short spans, few tokens
#     X  long spans or many tokens
#     S  the end of the row, from its beginning
#
# With two stacks, source and target of a denoiser go to encoder and decoder; with one stack they
# are concatenated, and the source is bidirectional. Rows of different denoisers differ in length:
# shorter ones end with padding, as a document of its own. A denoiser treats a row as one text.


def build_ul2(section: Ul2Config, context: RowContext) -> RowMaker:
    """Raises: ConfigError: The tokenizer lacks sentinels, a mode, or a decoder start token."""
    assert not context.document_mask, "a mode is that of a row"
    denoisers = section.denoisers
    for denoiser in denoisers:
        check_tokens(denoiser, context)
    start_id = start_of(context) if context.num_stacks == 2 else None
    make = partial(denoise, context=context, start_id=start_id)
    makers = [partial(make, span=denoiser) for denoiser in denoisers]
    weights = [denoiser.weight for denoiser in denoisers]
    return mix(makers, weights, "denoiser", context.seed, context.lengths, context.vocabulary.eos)


def describe_denoiser(rows: ModelRows, section: Ul2Config, seed: int) -> str:
    """Returns which denoiser one row was drawn for, in words."""
    weights = [denoiser.weight for denoiser in section.denoisers]
    (number,) = draw_parts(weights, "denoiser", seed, np.array(rows.sample_ids()))
    denoiser = section.denoisers[number]
    mode = f"{denoiser.mode}: " if denoiser.mode else ""
    if denoiser.prefix:
        return f"{mode}prefix, the last {denoiser.density:.0%}"
    return f"{mode}spans, {denoiser.density:.0%} in spans of {denoiser.mean_length:g}"


def denoised_kinds(rows: ModelRows, section: Ul2Config, vocabulary: Vocabulary) -> list[TokenKind]:
    """Returns the kinds of the tokens of a row of one stack, for `pretrain data show`."""
    assert rows.prefix_BT is not None
    return [TokenKind.SOURCE if is_read else TokenKind.TARGET for is_read in rows.prefix_BT[0].tolist()]
