"""UL2: a mixture of denoisers, each announced by a mode token (Tay et al. 2023, 3.1).

    R  short spans, few tokens       X  long spans or many tokens       S  the end of the row, from its beginning

With two stacks a denoiser's source and target go to encoder and decoder; with one they follow each other, the source
read in both directions. Rows of different denoisers have different lengths, and are padded.
"""

from functools import partial

import numpy as np

from pretrain.config.objective import DenoiserConfig, TaskConfig
from pretrain.objective.contract import RowContext, RowMaker
from pretrain.objective.mixed import mix
from pretrain.objective.seq2seq import start_of
from pretrain.objective.span import check_tokens, corrupt, for_two_stacks
from pretrain.rows import IGNORE_INDEX, ModelRows, PairRows, TokenRows


def build_ul2(config: TaskConfig, context: RowContext) -> RowMaker:
    """Raises: ConfigError: The tokenizer lacks sentinels, a mode, or a token that a decoder reads first."""
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
        return for_two_stacks(found, rows.sample_ids, start_id, document_mask=False)
    tokens, source_len = np.concatenate((found.source, found.target), axis=1), found.source.shape[1]
    targets = tokens[:, 1:].copy()
    targets[:, : source_len - 1] = IGNORE_INDEX
    return ModelRows(
        inputs=tokens[:, :-1],
        targets=targets,
        num_targets=found.target.size,
        sample_ids=rows.sample_ids,
        prefix=np.broadcast_to(np.arange(targets.shape[1]) < source_len, targets.shape),
    )
