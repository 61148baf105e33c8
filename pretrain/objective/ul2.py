"""UL2: a mixture of denoisers, each announced by a mode token (Tay et al. 2023, 3.1).

    R  short spans, few tokens       X  long spans or many tokens       S  the end of the row, from its beginning

With two stacks a denoiser's source and target go to encoder and decoder; with one they follow each other, the source
read in both directions. Rows of different denoisers have different lengths: the shorter ones end with padding, a
document of its own. A row is one text to its denoiser, whatever documents it holds.
"""

from functools import partial

import numpy as np

from pretrain.config.objective import DenoiserConfig, TaskConfig
from pretrain.objective.contract import RowContext, RowMaker
from pretrain.objective.mixed import mix
from pretrain.objective.seq2seq import start_of
from pretrain.objective.span import Corrupted, check_tokens, corrupt, for_two_stacks
from pretrain.rows import IGNORE_INDEX, ModelRows, PairRows, TokenRows


def build_ul2(config: TaskConfig, context: RowContext) -> RowMaker:
    """Raises: ConfigError: The tokenizer lacks sentinels, a mode, or a token that a decoder reads first."""
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


def for_one_stack(found: Corrupted, sample_ids: np.ndarray) -> ModelRows:
    """Returns rows of a decoder that reads the source in both directions, and then predicts the target."""
    source_len = found.source.shape[1]
    tokens = np.concatenate((found.source, found.target), axis=1)
    documents = np.concatenate((found.source_documents, found.target_documents), axis=1)
    learned = np.concatenate((np.zeros(found.source.shape, dtype=bool), ~found.lost), axis=1)
    prefix = np.broadcast_to(np.arange(tokens.shape[1]) < source_len, tokens.shape)
    if documents.any():
        # Rows that are not full: what is padding in source and target goes to the end.
        order = np.argsort(documents < 0, axis=1, kind="stable")
        tokens, documents, learned, prefix = (
            np.take_along_axis(values, order, axis=1) for values in (tokens, documents, learned, prefix)
        )
    targets = np.where(learned, tokens, IGNORE_INDEX)[:, 1:]
    positions = np.broadcast_to(np.arange(targets.shape[1]), targets.shape)
    return ModelRows(
        inputs=tokens[:, :-1],
        targets=targets,
        num_targets=int(learned.sum()),
        sample_ids=sample_ids,
        positions=positions if documents.any() else None,
        documents=documents[:, :-1] if documents.any() else None,
        prefix=prefix[:, :-1],
        num_padding=int((documents[:, :-1] < 0).sum()),
    )
