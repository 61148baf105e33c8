"""Next-token prediction (Radford et al. 2019) on texts or records, and prefix language modelling.

    tokens [B, T+1]  ->  inputs = tokens[:, :-1], targets = tokens[:, 1:]
    document starts  ->  document number and position of each token, and no loss across the border

A row that starts inside a document starts at position 0 too. If no document starts inside a row,
documents and positions are None, which is equivalent and selects the dense path of every attention
backend.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from pretrain.objective.row_maker import RowContext, count_padding, number_documents, real_tokens
from pretrain.rows import IGNORE_INDEX, TokenRows
from pretrain.types import Batch, ModelRows, RowMaker
from pretrain.utils.rng import draw_uniform


def build_causal(section: None, context: RowContext) -> RowMaker:
    """Every token is a target."""
    return partial(causal_rows, document_mask=context.document_mask, use_loss_mask=False)


def build_supervised(section: None, context: RowContext) -> RowMaker:
    """Only tokens in the loss mask of a record are targets: responses, not prompts."""
    return partial(causal_rows, document_mask=context.document_mask, use_loss_mask=True)


def causal_rows(rows: TokenRows, document_mask: bool, use_loss_mask: bool = True) -> ModelRows:
    """Makes inputs, targets, positions and document numbers of raw rows; about 2 ns a token.

    Without `document_mask` a row is one text. With `use_loss_mask`, only tokens in the loss mask of
    the rows are targets.
    """
    assert rows.source is None, "pairs need a model with an encoder"
    num_rows, width = rows.tokens_BT.shape
    seq_len = width - 1
    inputs = rows.tokens_BT[:, :-1].astype(np.int64)
    targets = rows.tokens_BT[:, 1:].astype(np.int64)
    # None: a row is one document, without arrays of the size of the batch.
    positions = documents = None
    if document_mask and len(rows.starts):
        row, column = np.divmod(rows.starts, width)
        border = column > 0
        row, column = row[border], column[border]
        targets[row, column - 1] = IGNORE_INDEX
        inside = column < seq_len
        if inside.any():
            positions, documents = number_documents(row[inside], column[inside], num_rows, seq_len)
    if rows.num_tokens_B is not None:
        padded = np.arange(1, width) >= rows.num_tokens_B[:, None]
        targets[padded] = IGNORE_INDEX
    if use_loss_mask and rows.loss_mask_BT is not None:
        targets[~rows.loss_mask_BT[:, 1:]] = IGNORE_INDEX
    return Batch(
        inputs,
        targets,
        **rows.carried(),
        positions_BT=positions,
        documents_BT=documents,
        num_padding=count_padding(rows, seq_len),
    )


# Prefix language modelling (Raffel et al. 2020, 3.2.1), in one stack.
#
#     document  ->  prefix of 1 .. n-1 tokens, uniformly: bidirectional, no loss
#                   suffix: causal, with loss
#
# With a document mask each document of a row has its own prefix; without, the row is one document.


def build_prefix(section: None, context: RowContext) -> RowMaker:
    """Each document of a row has a prefix without loss."""
    return partial(prefix_rows, seed=context.seed, document_mask=context.document_mask)


def prefix_rows(rows: TokenRows, seed: int, document_mask: bool) -> ModelRows:
    """Makes rows whose documents begin with a prefix without loss; `seed` is the run's."""
    whole = causal_rows(rows, document_mask)
    num_rows, seq_len = whole.tokens_BT.shape
    columns = np.arange(seq_len)
    positions = whole.positions_BT
    if positions is None:
        positions = np.broadcast_to(columns, whole.tokens_BT.shape)
    first = columns - positions
    real = real_tokens(rows, seq_len)
    # Lengths of documents, at their first column: the largest position plus 1.
    lengths = np.zeros((num_rows, seq_len), dtype=np.int64)
    row = np.repeat(np.arange(num_rows), seq_len)
    reached = positions + 1 if real is None else (positions + 1) * real
    np.maximum.at(lengths, (row, first.ravel()), reached.ravel())
    number = draw_uniform("prefix", seed, rows.sample_ids_B, seq_len)
    at_first = np.minimum(1 + (number * (lengths - 1)).astype(np.int64), lengths - 1)
    prefix = positions < np.take_along_axis(at_first, first, axis=1)
    targets = whole.targets_BT.copy()
    targets[:, :-1][prefix[:, 1:]] = IGNORE_INDEX
    return replace(whole, targets_BT=targets, prefix_BT=prefix)
