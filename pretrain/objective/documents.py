"""Where documents lie in rows: numbers, positions, and the padding behind them."""

import numpy as np

from pretrain.rows import TokenRows


def number_documents(row: np.ndarray, column: np.ndarray, num_rows: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns positions (int64) and document numbers (int32) [num_rows, seq_len].

    Args:
        row: Of each document start that is not the first of its row, ascending with its column.
        column: Likewise, in [1, seq_len).
        num_rows: B.
        seq_len: T.
    """
    # Both are running sums over the flattened rows, of steps that are special only where a segment (a row or a
    # document) starts: no temporary of the size of the batch.
    row_starts = np.arange(num_rows) * seq_len
    borders = row * seq_len + column
    starts = np.sort(np.concatenate((row_starts, borders)), kind="stable")
    positions = np.ones(num_rows * seq_len, dtype=np.int64)
    positions[starts[1:]] = 1 - (starts[1:] - starts[:-1])
    positions[0] = 0
    documents = np.zeros(num_rows * seq_len, dtype=np.int32)
    documents[borders] = 1
    documents[row_starts[1:]] = -np.bincount(row, minlength=num_rows)[:-1]
    np.cumsum(positions, out=positions)
    np.cumsum(documents, out=documents)
    return positions.reshape(num_rows, seq_len), documents.reshape(num_rows, seq_len)


def inner_starts(rows: TokenRows, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns row and column of the documents that start inside the first `seq_len` columns, not at a row's start."""
    row, column = np.divmod(rows.starts, rows.tokens.shape[1])
    inner = (column > 0) & (column < seq_len)
    return row[inner], column[inner]


def count_padding(rows: TokenRows, seq_len: int) -> int:
    """Returns how many of the first `seq_len` columns of all rows are padding."""
    return 0 if rows.num_tokens is None else int(np.maximum(seq_len - rows.num_tokens, 0).sum())


def real_tokens(rows: TokenRows, seq_len: int) -> np.ndarray | None:
    """Returns which of the first `seq_len` columns are not padding, bool [B, seq_len]; None: all."""
    return None if rows.num_tokens is None else np.arange(seq_len) < rows.num_tokens[:, None]


def place_documents(rows: TokenRows, document_mask: bool) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Returns positions and documents of rows that are read in both directions, whose padding nobody may see.

    None where each row is one document, without padding.
    """
    num_rows, seq_len = len(rows.tokens), rows.tokens.shape[1] - 1
    row, column = inner_starts(rows, seq_len)
    real = real_tokens(rows, seq_len)
    if real is not None and real.all():
        real = None
    if real is None and not (document_mask and len(row)):
        return None, None
    if not document_mask:
        row, column = row[:0], column[:0]
    positions, documents = number_documents(row, column, num_rows, seq_len)
    if real is not None:
        documents[~real] = -1
    return positions, documents
