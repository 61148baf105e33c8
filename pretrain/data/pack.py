"""Concat packing: rows of consecutive tokens, documents back to back, cut wherever a row ends.

    tokens [B, T+1]  ->  inputs = tokens[:, :-1], targets = tokens[:, 1:]
    document starts  ->  number of each token's document in its row, position within it, and no loss across the border

A row that starts inside a document starts at position 0 all the same: what it cannot see, it need not count. When no
row holds a border, documents and positions are None, the dense path of every attention backend; None means exactly
what the arrays would have said.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows as they come from the shards.

    Attributes:
        tokens: [B, T+1], the shards' dtype.
        starts: int64 [any], ascending: places in `tokens`, flattened, at which a document starts.
        num_tokens: int64 [B]: tokens of each row that are real; the rest is padding. None: all of them.
        sample_ids: int64 [B].
        learned: bool [B, T+1]: whether a token is a target at all. None: all are.
    """

    tokens: np.ndarray
    starts: np.ndarray
    num_tokens: np.ndarray | None
    sample_ids: np.ndarray
    learned: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class PairRows:
    """Rows of pairs: document n of a source row belongs to document n of the target row.

    Attributes:
        source: [B, S+1]; the last column is never read.
        target: [B, T+1].
    """

    source: TokenRows
    target: TokenRows


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows as the model takes them; the fields of `types.Batch`, in numpy.

    Attributes:
        inputs: int64 [B, T].
        targets: int64 [B, T], IGNORE_INDEX where there is no loss.
        positions: int64 [B, T], or None: 0..T-1 in every row.
        documents: int32 [B, T], or None: each row is one document.
        num_targets: Targets that are not IGNORE_INDEX.
    """

    inputs: np.ndarray
    targets: np.ndarray
    positions: np.ndarray | None
    documents: np.ndarray | None
    num_targets: int


def crop_rows(rows: TokenRows, multiple: int = 8) -> TokenRows:
    """Takes away the columns that are padding in every row, down to a multiple of `multiple` and at least that."""
    assert rows.num_tokens is not None, "rows of known length"
    width = rows.tokens.shape[1]
    longest = int(rows.num_tokens.max(initial=1))
    kept = min(width, -(-min(longest, width - 1) // multiple) * multiple + 1)
    row, column = np.divmod(rows.starts, width)
    inside = column < kept
    return TokenRows(
        tokens=rows.tokens[:, :kept],
        starts=row[inside] * kept + column[inside],
        num_tokens=rows.num_tokens,
        sample_ids=rows.sample_ids,
        learned=None if rows.learned is None else rows.learned[:, :kept],
    )


def pack_rows(rows: TokenRows, document_mask: bool) -> PackedRows:
    """Makes inputs, targets, positions and document numbers of raw rows; about 2 ns a token.

    Args:
        rows: From the stream.
        document_mask: Documents do not see each other, and the last token of one does not predict the next one. Off:
            the row is one text.
    """
    from pretrain.types import IGNORE_INDEX  # and torch, which reading rows does not need

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
            positions, documents = _number_documents(row[inside], column[inside], num_rows, seq_len)
    if rows.num_tokens is not None:
        padded = np.arange(1, width) >= rows.num_tokens[:, None]
        targets[padded] = IGNORE_INDEX
    if rows.learned is not None:
        targets[~rows.learned[:, 1:]] = IGNORE_INDEX
    if rows.num_tokens is not None or rows.learned is not None:
        num_ignored = int((targets == IGNORE_INDEX).sum())
    return PackedRows(inputs, targets, positions, documents, targets.size - num_ignored)


def pack_pair_rows(rows: PairRows, start_id: int) -> tuple[PackedRows, PackedRows]:
    """Makes what an encoder-decoder takes: source rows, and target rows of which each document is shifted by one.

    Args:
        rows: From the stream; a source's document numbers are those of its target.
        start_id: What the decoder reads before a target's first token.

    Returns:
        (source, target). The source's targets say nothing. The target's inputs are `start_id` and all tokens of a
        document but its last, its targets all tokens; padding has none.
    """
    from pretrain.types import IGNORE_INDEX  # and torch, which reading rows does not need

    source = pack_rows(rows.source, document_mask=True)
    width = rows.target.tokens.shape[1]
    shape = rows.target.tokens[:, :-1].shape
    targets = rows.target.tokens[:, :-1].astype(np.int64)
    inputs = np.empty(shape, dtype=np.int64)
    inputs[:, 1:] = targets[:, :-1]
    row, column = np.divmod(rows.target.starts, width)
    inside = column < shape[1]
    inputs[row[inside], column[inside]] = start_id
    inputs[:, 0] = start_id
    assert rows.target.num_tokens is not None, "rows of pairs are padded"
    targets[np.arange(shape[1]) >= rows.target.num_tokens[:, None]] = IGNORE_INDEX
    positions, documents = _number_documents(*_inner(row, column, shape[1]), *shape)
    return source, PackedRows(inputs, targets, positions, documents, int((targets != IGNORE_INDEX).sum()))


def _inner(row: np.ndarray, column: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns where documents start that are not the first of their row."""
    inner = (column > 0) & (column < seq_len)
    return row[inner], column[inner]


def _number_documents(
    row: np.ndarray, column: np.ndarray, num_rows: int, seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns positions and document numbers [num_rows, seq_len], given where the inner documents start."""
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
