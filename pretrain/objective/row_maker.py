"""Settings of row makers, and their common parts: document numbers, positions and padding of rows."""

from dataclasses import dataclass

import numpy as np

from pretrain.config.lengths import RowLengths
from pretrain.rows import TokenRows, Vocabulary


@dataclass(frozen=True, slots=True)
class RowContext:
    """Settings of a row maker.

    Attributes:
        seed: Seed of the run; corruption depends on it and on the sample id of a row only.
        vocabulary: Special tokens and size of the tokenizer.
        lengths: Lengths of raw rows and of model rows.
        num_stacks: Stacks of the model: 1 or 2.
        document_mask: Documents of a row neither attend to nor predict each other.
    """

    seed: int
    vocabulary: Vocabulary
    lengths: RowLengths
    num_stacks: int = 1
    document_mask: bool = True


def number_documents(row: np.ndarray, column: np.ndarray, num_rows: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns positions (int64) and document numbers (int32), [num_rows, seq_len].

    `row` and `column` of each document start inside a row, ascending; columns are in [1, seq_len).
    """
    # Both are cumulative sums over the flattened rows. Positions step by 1 and documents by 0,
    # except where a row or a document starts: no temporaries of the size of the batch.
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
    """Returns row and column of the documents that start in columns 1 .. seq_len - 1."""
    row, column = np.divmod(rows.starts, rows.tokens_BT.shape[1])
    inner = (column > 0) & (column < seq_len)
    return row[inner], column[inner]


def count_padding(rows: TokenRows, seq_len: int) -> int:
    """Returns the number of padding tokens in the first `seq_len` columns of all rows."""
    return 0 if rows.num_tokens_B is None else int(np.maximum(seq_len - rows.num_tokens_B, 0).sum())


def real_tokens(rows: TokenRows, seq_len: int) -> np.ndarray | None:
    """Returns the real tokens in the first columns, bool [B, seq_len]; None: no padding."""
    return None if rows.num_tokens_B is None else np.arange(seq_len) < rows.num_tokens_B[:, None]


def place_documents(rows: TokenRows, document_mask: bool) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Returns positions and document numbers for bidirectional attention, which must mask padding.

    (None, None) if each row is one document without padding.
    """
    num_rows, seq_len = len(rows.tokens_BT), rows.tokens_BT.shape[1] - 1
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
