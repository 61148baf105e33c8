"""Mixtures of objectives, drawn by weight for each row from (seed, sample id). And UL2."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from pretrain.config.lengths import RowLengths
from pretrain.kinds.objectives.ul2 import Ul2Config
from pretrain.objective.row_maker import RowContext
from pretrain.objective.seq2seq import start_of
from pretrain.objective.span import check_tokens, denoise
from pretrain.objective.token_kinds import TokenKind
from pretrain.rows import IGNORE_INDEX, ModelRows, RowMaker, SourceRows, TokenRows, Vocabulary, select_rows
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
        chosen = draw_parts(weights, purpose, seed, rows.sample_ids)
        found = np.unique(chosen).tolist()
        parts = [makers[kind](select_rows(rows, chosen == kind)) for kind in found]
        order = np.concatenate([np.flatnonzero(chosen == kind) for kind in found])
        return merge(parts, np.argsort(order), lengths, fill)

    return make


def draw_parts(weights: Sequence[float], purpose: str, seed: int, sample_ids: np.ndarray) -> np.ndarray:
    """Draws the part of a mixture for each row, int64 [B]; arguments as in `mix`."""
    bounds = np.cumsum(weights) / np.sum(weights)
    number = draw_uniform(purpose, seed, sample_ids, 1)[:, 0]
    return np.minimum(np.searchsorted(bounds, number, side="right"), len(weights) - 1)


def merge(parts: Sequence[ModelRows], order: np.ndarray, lengths: RowLengths, fill: int) -> ModelRows:
    """Concatenates rows, padded to the same length, and reorders them by `order`."""
    sources = [part.source for part in parts if part.source is not None]
    assert len(sources) in (0, len(parts)), "objectives of one run need the same stacks"
    targets = _join([part.targets for part in parts], order, lengths.target, IGNORE_INDEX)
    prefix = target_positions = source = None
    if any(part.prefix is not None for part in parts):
        prefixes = [np.zeros_like(x.inputs, dtype=bool) if x.prefix is None else x.prefix for x in parts]
        prefix = _join(prefixes, order, lengths.target, False)
    if all(part.target_positions is not None for part in parts):
        target_positions = np.flatnonzero(targets != IGNORE_INDEX)
    placed = [(part.inputs, part.positions, part.documents) for part in parts]
    inputs, positions, documents = _join_placed(placed, order, lengths.target, fill)
    num_padding = inputs.size + sum(part.num_padding - part.inputs.size for part in parts)
    if sources:
        assert lengths.source is not None
        placed = [(part.tokens, part.positions, part.documents) for part in sources]
        source = SourceRows(*_join_placed(placed, order, lengths.source, fill))
        num_padding += source.tokens.size - sum(part.tokens.size for part in sources)
    return ModelRows(
        inputs=inputs,
        targets=targets,
        num_targets=sum(part.num_targets for part in parts),
        sample_ids=np.concatenate([part.sample_ids for part in parts])[order],
        positions=positions,
        documents=documents,
        prefix=prefix,
        target_positions=target_positions,
        source=source,
        num_padding=num_padding,
    )


_Placed = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]
"""Tokens, positions and document numbers."""


def _join_placed(parts: Sequence[_Placed], order: np.ndarray, length: int, fill: int) -> _Placed:
    """Joins all three; (tokens, None, None) if all rows are single documents without padding."""
    joined = _join([tokens for tokens, _, _ in parts], order, length, fill)
    if all(documents is None and tokens.shape[1] == length for tokens, _, documents in parts):
        return joined, None, None
    positions = [np.indices(x.shape)[1] if found is None else found for x, found, _ in parts]
    documents = [np.zeros_like(x, dtype=np.int32) if found is None else found for x, _, found in parts]
    return joined, _join(positions, order, length, 0), _join(documents, order, length, -1)


def _join(arrays: Sequence[np.ndarray], order: np.ndarray, length: int, fill: int) -> np.ndarray:
    padded = [np.pad(a, ((0, 0), (0, length - a.shape[1])), constant_values=fill) for a in arrays]
    return np.concatenate(padded)[order]


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
    (number,) = draw_parts(weights, "denoiser", seed, rows.sample_ids)
    denoiser = section.denoisers[number]
    mode = f"{denoiser.mode}: " if denoiser.mode else ""
    if denoiser.prefix:
        return f"{mode}prefix, the last {denoiser.density:.0%}"
    return f"{mode}spans, {denoiser.density:.0%} in spans of {denoiser.mean_length:g}"


def denoised_kinds(rows: ModelRows, section: Ul2Config, vocabulary: Vocabulary) -> list[TokenKind]:
    """Returns the kinds of the tokens of a row of one stack, for `pretrain data show`."""
    assert rows.prefix is not None
    return [TokenKind.SOURCE if is_read else TokenKind.TARGET for is_read in rows.prefix[0].tolist()]
