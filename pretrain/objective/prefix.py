"""Prefix language modelling (Raffel et al. 2020, 3.2.1), in one stack: a document's beginning is read in both
directions, and the rest predicted from it.

    document  ->  prefix of 1 .. n-1 tokens, uniformly  ->  bidirectional, no loss;   suffix: causal, learned

With a document mask each document of a row has its own prefix; without, the row is one document.
"""

import numpy as np

from pretrain.config.objective import TaskConfig
from pretrain.objective.causal import causal_rows
from pretrain.objective.contract import RowContext, RowMaker
from pretrain.objective.documents import real_tokens
from pretrain.rows import IGNORE_INDEX, ModelRows, PairRows, TokenRows
from pretrain.utils.rng import draw_uniform


def build_prefix(config: TaskConfig, context: RowContext) -> RowMaker:
    """Each document of a row is split."""

    def make(rows: TokenRows | PairRows) -> ModelRows:
        assert isinstance(rows, TokenRows), "pairs need a model with an encoder"
        return prefix_rows(rows, context.seed, context.document_mask)

    return make


def prefix_rows(rows: TokenRows, seed: int, document_mask: bool) -> ModelRows:
    """Makes rows whose documents begin with a prefix that has no loss.

    Args:
        rows: From the stream.
        seed: Of the run.
        document_mask: Documents do not see each other.
    """
    whole = causal_rows(rows, document_mask)
    num_rows, seq_len = whole.inputs.shape
    columns = np.arange(seq_len)
    positions = np.broadcast_to(columns, whole.inputs.shape) if whole.positions is None else whole.positions
    first = columns - positions
    real = real_tokens(rows, seq_len)
    # The length of a document is one more than the position of its last token, which is the largest.
    lengths = np.zeros((num_rows, seq_len), dtype=np.int64)
    row = np.repeat(np.arange(num_rows), seq_len)
    np.maximum.at(lengths, (row, first.ravel()), (positions + 1 if real is None else (positions + 1) * real).ravel())
    number = draw_uniform("prefix", seed, rows.sample_ids, seq_len)
    at_first = np.minimum(1 + (number * (lengths - 1)).astype(np.int64), lengths - 1)
    prefix = positions < np.take_along_axis(at_first, first, axis=1)
    targets = whole.targets.copy()
    targets[:, :-1][prefix[:, 1:]] = IGNORE_INDEX
    return ModelRows(
        inputs=whole.inputs,
        targets=targets,
        num_targets=int((targets != IGNORE_INDEX).sum()),
        sample_ids=rows.sample_ids,
        positions=whole.positions,
        documents=whole.documents,
        prefix=prefix,
        num_padding=whole.num_padding,
    )
