"""Mixtures of objectives: each row is assigned to one, drawn by (seed, sample id) and weight. And UL2."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from pretrain.config.lengths import RowLengths
from pretrain.config.objective import DenoiserConfig, TaskConfig
from pretrain.objective.contract import RowContext, RowMaker
from pretrain.objective.seq2seq import start_of
from pretrain.objective.span import CorruptedRows, check_tokens, corrupt, for_two_stacks
from pretrain.rows import IGNORE_INDEX, ModelRows, PairRows, SourceRows, TokenRows, select_rows
from pretrain.utils.rng import draw_uniform


def mix(
    makers: Sequence[RowMaker], weights: Sequence[float], purpose: str, seed: int, lengths: RowLengths, fill: int
) -> RowMaker:
    """Returns a row maker that assigns each row to one of `makers`.

    Args:
        makers: Row makers of the objectives.
        weights: Weights of the makers, in any scale.
        purpose: Name of the random draw (`draw_uniform`).
        seed: Seed of the run.
        lengths: Lengths of the result; shorter rows are padded.
        fill: Token id of padding.
    """
    if len(makers) == 1:
        return makers[0]

    def make(rows: TokenRows | PairRows) -> ModelRows:
        assert isinstance(rows, TokenRows), "objectives of pairs are not mixed"
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
    shape = [part.inputs.shape for part in parts]
    targets = _stack([part.targets for part in parts], lengths.target, IGNORE_INDEX)[order]
    prefix = None
    if any(part.prefix is not None for part in parts):
        prefixes = [
            np.zeros(size, dtype=bool) if part.prefix is None else part.prefix
            for part, size in zip(parts, shape, strict=True)
        ]
        prefix = _stack(prefixes, lengths.target, False)[order]
    positions, documents = _merge_documents(
        [(part.positions, part.documents) for part in parts], shape, lengths.target, order
    )
    source = None
    if sources:
        assert lengths.source is not None
        of_source = [(part.positions, part.documents) for part in sources]
        of_shape = [part.tokens.shape for part in sources]
        tokens = _stack([part.tokens for part in sources], lengths.source, fill)[order]
        source = SourceRows(tokens, *_merge_documents(of_source, of_shape, lengths.source, order))
    return ModelRows(
        inputs=_stack([part.inputs for part in parts], lengths.target, fill)[order],
        targets=targets,
        num_targets=sum(part.num_targets for part in parts),
        sample_ids=np.concatenate([part.sample_ids for part in parts])[order],
        positions=positions,
        documents=documents,
        prefix=prefix,
        target_positions=(
            None if any(part.target_positions is None for part in parts) else np.flatnonzero(targets != IGNORE_INDEX)
        ),
        source=source,
        num_padding=sum(_num_added(part, lengths) + part.num_padding for part in parts),
    )


def _num_added(part: ModelRows, lengths: RowLengths) -> int:
    """Returns the number of padding positions that `merge` adds."""
    added = lengths.target - part.inputs.shape[1]
    if part.source is not None and lengths.source is not None:
        added += lengths.source - part.source.tokens.shape[1]
    return len(part.inputs) * added


def _merge_documents(
    parts: Sequence[tuple[np.ndarray | None, np.ndarray | None]],
    shapes: Sequence[tuple[int, ...]],
    length: int,
    order: np.ndarray,
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Returns positions and documents of all rows; (None, None) if all rows are single documents without padding."""
    if all(documents is None and shape[1] == length for (_, documents), shape in zip(parts, shapes, strict=True)):
        return None, None
    positions = [
        np.broadcast_to(np.arange(shape[1]), shape) if part is None else part
        for (part, _), shape in zip(parts, shapes, strict=True)
    ]
    documents = [
        np.zeros(shape, dtype=np.int32) if part is None else part
        for (_, part), shape in zip(parts, shapes, strict=True)
    ]
    return _stack(positions, length, 0)[order], _stack(documents, length, -1)[order]


def _stack(arrays: Sequence[np.ndarray], length: int, fill: int) -> np.ndarray:
    padded = [np.pad(a, ((0, 0), (0, length - a.shape[1])), constant_values=fill) for a in arrays]
    return np.concatenate(padded)


# UL2: a mixture of denoisers, each marked by a mode token (Tay et al. 2023, 3.1).
#
#     R  short spans, few tokens       X  long spans or many tokens       S  the end of the row, from its beginning
#
# With two stacks, source and target of a denoiser go to encoder and decoder; with one stack they are concatenated, and
# the source is bidirectional. Rows of different denoisers differ in length: shorter ones end with padding, as a
# document of its own. A denoiser treats a row as one text.


def build_ul2(config: TaskConfig, context: RowContext) -> RowMaker:
    """Raises: ConfigError: The tokenizer lacks sentinels, a mode, or a decoder start token."""
    assert not context.document_mask, "a mode is that of a row"
    denoisers = config.ul2.denoisers
    for denoiser in denoisers:
        check_tokens(denoiser, context)
    start_id = start_of(context) if context.num_stacks == 2 else None
    makers = [partial(_denoise, denoiser=denoiser, context=context, start_id=start_id) for denoiser in denoisers]
    weights = [denoiser.weight for denoiser in denoisers]
    return mix(makers, weights, "denoiser", context.seed, context.lengths, context.vocabulary.eos)


def _denoise(
    rows: TokenRows | PairRows, denoiser: DenoiserConfig, context: RowContext, start_id: int | None
) -> ModelRows:
    assert isinstance(rows, TokenRows), "pairs are not corrupted"
    found = corrupt(rows, denoiser, context)
    if start_id is not None:
        return for_two_stacks(found, rows.sample_ids, start_id)
    return for_one_stack(found, rows.sample_ids)


def for_one_stack(found: CorruptedRows, sample_ids: np.ndarray) -> ModelRows:
    """Returns rows of a decoder with a bidirectional source as prefix, followed by the target."""
    source_len = found.source.shape[1]
    tokens = np.concatenate((found.source, found.target), axis=1)
    documents = np.concatenate((found.source_documents, found.target_documents), axis=1)
    loss_mask = np.concatenate((np.zeros(found.source.shape, dtype=bool), ~found.lost), axis=1)
    prefix = np.broadcast_to(np.arange(tokens.shape[1]) < source_len, tokens.shape)
    if documents.any():
        # Rows that are not full: move the padding of source and target to the end.
        order = np.argsort(documents < 0, axis=1, kind="stable")
        tokens, documents, loss_mask, prefix = (
            np.take_along_axis(values, order, axis=1) for values in (tokens, documents, loss_mask, prefix)
        )
    targets = np.where(loss_mask, tokens, IGNORE_INDEX)[:, 1:]
    positions = np.broadcast_to(np.arange(targets.shape[1]), targets.shape)
    return ModelRows(
        inputs=tokens[:, :-1],
        targets=targets,
        num_targets=int(loss_mask.sum()),
        sample_ids=sample_ids,
        positions=positions if documents.any() else None,
        documents=documents[:, :-1] if documents.any() else None,
        prefix=prefix[:, :-1],
        num_padding=int((documents[:, :-1] < 0).sum()),
    )
