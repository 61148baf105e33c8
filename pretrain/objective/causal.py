"""Next-token prediction (Radford et al. 2019), on texts or on what is learned of records.

    tokens [B, T+1]  ->  inputs = tokens[:, :-1], targets = tokens[:, 1:]
    document starts  ->  number of each token's document in its row, position within it, and no loss across the border

A row that starts inside a document starts at position 0 all the same: what it cannot see, it need not count. When no
row holds a border, documents and positions are None, the dense path of every attention backend; None means exactly
what the arrays would have said.
"""

from functools import partial

import numpy as np

from pretrain.config.objective import TaskConfig
from pretrain.objective.contract import RowContext, RowMaker
from pretrain.objective.documents import count_padding, number_documents
from pretrain.rows import IGNORE_INDEX, ModelRows, PairRows, TokenRows


def build_causal(config: TaskConfig, context: RowContext) -> RowMaker:
    """Every token is a target."""
    return partial(causal_rows, document_mask=context.document_mask, learned_only=False)


def build_supervised(config: TaskConfig, context: RowContext) -> RowMaker:
    """Of a record only what is learned is a target: responses, not prompts."""
    return partial(causal_rows, document_mask=context.document_mask, learned_only=True)


def causal_rows(rows: TokenRows | PairRows, document_mask: bool, learned_only: bool = True) -> ModelRows:
    """Makes inputs, targets, positions and document numbers of raw rows; about 2 ns a token.

    Args:
        rows: From the stream.
        document_mask: Documents do not see each other, and the last token of one does not predict the next one. Off:
            the row is one text.
        learned_only: Tokens of records that are not learned are no targets.
    """
    assert isinstance(rows, TokenRows), "pairs need a model with an encoder"
    num_rows, width = rows.tokens.shape
    seq_len = width - 1
    inputs = rows.tokens[:, :-1].astype(np.int64)
    targets = rows.tokens[:, 1:].astype(np.int64)
    num_ignored = 0
    positions = documents = None
    if document_mask and len(rows.starts):
        row, column = np.divmod(rows.starts, width)
        border = column > 0
        row, column = row[border], column[border]
        targets[row, column - 1] = IGNORE_INDEX
        num_ignored = len(row)
        inside = column < seq_len
        if inside.any():
            positions, documents = number_documents(row[inside], column[inside], num_rows, seq_len)
    learned = rows.learned if learned_only else None
    if rows.num_tokens is not None:
        padded = np.arange(1, width) >= rows.num_tokens[:, None]
        targets[padded] = IGNORE_INDEX
    if learned is not None:
        targets[~learned[:, 1:]] = IGNORE_INDEX
    if rows.num_tokens is not None or learned is not None:
        num_ignored = int((targets == IGNORE_INDEX).sum())
    return ModelRows(
        inputs=inputs,
        targets=targets,
        num_targets=targets.size - num_ignored,
        sample_ids=rows.sample_ids,
        positions=positions,
        documents=documents,
        num_padding=count_padding(rows, seq_len),
    )
