"""Sequence to sequence: a decoder predicts the target of each pair (Sutskever et al. 2014).

    source tokens [B, S+1]  ->  encoder inputs, the last column dropped
    target tokens [B, T+1]  ->  targets; inputs are the targets shifted by one after a start token
                                (teacher forcing)

Document n of a target row attends to document n of its source row only.

Captions of images (Vinyals et al. 2015) are the same, each with a row of its own:

    pixels [B, C, Y, X]      ->  encoder
    tokens of captions       ->  targets and inputs, as above
"""

from dataclasses import replace
from functools import partial

import numpy as np

from pretrain.errors import ConfigError
from pretrain.objective.row_maker import RowContext, count_padding, inner_starts, number_documents
from pretrain.rows import IGNORE_INDEX, TokenRows
from pretrain.types import Batch, ModelRows, RowMaker, StackRows


def build_seq2seq(section: None, context: RowContext) -> RowMaker:
    """Pairs, one or several a row. Raises: ConfigError: The tokenizer has no decoder start token."""
    return partial(pair_rows, start_id=start_of(context))


def start_of(context: RowContext) -> int:
    """Returns the decoder start token. Raises: ConfigError: The tokenizer has none."""
    if context.vocabulary.start is None:
        token = "a <pad> or <s> token (tokenizer.special_tokens)"
        fix = f"prepare with {token}, or set model.special_tokens.start"
        raise ConfigError("the tokenizer has no token that a decoder reads first", fix=fix)
    return context.vocabulary.start


def build_captions(section: None, context: RowContext) -> RowMaker:
    """Captions of images. Raises: ConfigError: The tokenizer has no decoder start token."""
    assert context.lengths.source is not None, "a model of images, by `image_lengths`"
    return partial(caption_rows, start_id=start_of(context), num_read=context.lengths.source)


def caption_rows(rows: TokenRows, start_id: int, num_read: int) -> ModelRows:
    """Makes rows of a caption and its image, of which the encoder reads `num_read` vectors."""
    assert rows.num_tokens_B is not None, "rows of captions are padded"
    num_rows, seq_len = len(rows.tokens_BT), rows.tokens_BT.shape[1] - 1
    targets = rows.tokens_BT[:, :-1].astype(np.int64)
    inputs = np.empty_like(targets)
    inputs[:, 1:] = targets[:, :-1]
    inputs[:, 0] = start_id
    targets[np.arange(seq_len) >= rows.num_tokens_B[:, None]] = IGNORE_INDEX
    # An image that could not be read has no caption either.
    num_unread = int(np.count_nonzero(rows.num_tokens_B == 0))
    return Batch(
        inputs,
        targets,
        **rows.carried(),
        source=StackRows(np.zeros((num_rows, num_read), dtype=np.int64)),
        num_padding=count_padding(rows, seq_len) + num_read * num_unread,
    )


def pair_rows(rows: TokenRows, start_id: int) -> ModelRows:
    """Makes rows of an encoder-decoder; targets begin with `start_id`, padding has no target."""
    assert rows.source is not None, "texts have no source"
    num_rows, width = rows.tokens_BT.shape
    seq_len = width - 1
    source_len = rows.source.tokens_BT.shape[1] - 1
    targets = rows.tokens_BT[:, :-1].astype(np.int64)
    inputs = np.empty_like(targets)
    inputs[:, 1:] = targets[:, :-1]
    row, column = np.divmod(rows.starts, width)
    inside = column < seq_len
    inputs[row[inside], column[inside]] = start_id
    inputs[:, 0] = start_id
    assert rows.num_tokens_B is not None, "rows of pairs are padded"
    targets[np.arange(seq_len) >= rows.num_tokens_B[:, None]] = IGNORE_INDEX
    positions, documents = number_documents(*inner_starts(rows, seq_len), num_rows, seq_len)
    source = StackRows(rows.source.tokens_BT[:, :-1].astype(np.int64))
    source_starts = inner_starts(rows.source, source_len)
    if len(source_starts[0]):
        of_source = number_documents(*source_starts, num_rows, source_len)
        source = replace(source, positions_BT=of_source[0], documents_BT=of_source[1])
    return Batch(
        inputs,
        targets,
        **rows.carried(),
        positions_BT=positions,
        documents_BT=documents,
        source=source,
        num_padding=count_padding(rows, seq_len) + count_padding(rows.source, source_len),
    )
