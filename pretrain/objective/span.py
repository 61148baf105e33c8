"""Span corruption (Raffel et al. 2020, 3.1.4), for an encoder and a decoder.

    row      Thank you for inviting me to your party last week
    source   Thank you <X> me to your party <Y> </s>             the kept tokens, a sentinel for each span
    target   <X> for inviting <Y> last week </s>                 the spans, each after its sentinel

All rows of a run have the same lengths (config/lengths.py), without padding or cropping. A denoiser
that is a prefix language model removes the end of a row, without a sentinel.

With a document mask, source and target of a document attend to each other only, and sentinels
restart in each document. A span across a border belongs to the first document, and its tokens of
the next document have no loss. Rows that are not full (the last of a validation split, damaged
ones) end with a document of padding, number -1.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from pretrain.errors import ConfigError
from pretrain.kinds.corruption import Corruption, DenoiserConfig, SpanConfig, corruption_of
from pretrain.objective.row_maker import RowContext, inner_starts, number_documents, real_tokens
from pretrain.objective.seq2seq import start_of
from pretrain.rows import IGNORE_INDEX, TokenRows
from pretrain.types import Batch, ModelRows, RowMaker, StackRows
from pretrain.utils.rng import draw_uniform


def draw_noise(found: Corruption, row_len: int, seed: int, sample_ids: np.ndarray) -> np.ndarray:
    """Draws the tokens to remove, bool [B, row_len]: `num_noise` a row, in `num_spans` spans.

    `random_spans_noise_mask` of Raffel et al. 2020, for many rows: kept, noise, kept, noise, ...,
    at least one token each, lengths uniform among all such partitions.
    """
    kept = _cut(row_len - found.num_noise, found.num_spans, "kept spans", seed, sample_ids)
    noise = _cut(found.num_noise, found.num_spans, "noise spans", seed, sample_ids)
    lengths = np.stack((kept, noise), axis=2).reshape(len(sample_ids), -1)
    is_noise = np.tile(np.arange(2 * found.num_spans) % 2 == 1, len(sample_ids))
    return np.repeat(is_noise, lengths.reshape(-1)).reshape(len(sample_ids), row_len)


def _cut(count: int, parts: int, purpose: str, seed: int, sample_ids: np.ndarray) -> np.ndarray:
    """Draws lengths [B, parts], each at least 1, with sum `count`; all such are equally likely."""
    numbers = draw_uniform(purpose, seed, sample_ids, count - 1)
    cuts = np.sort(np.argsort(numbers, axis=1, kind="stable")[:, : parts - 1], axis=1) + 1
    ends = np.concatenate((cuts, np.full((len(sample_ids), 1), count)), axis=1)
    return np.diff(ends, axis=1, prepend=0)


@dataclass(frozen=True, slots=True)
class CorruptedRows:
    """Rows with spans removed; documents are int32, -1 for padding.

    Attributes:
        source: int64 [B, S]: kept tokens and sentinels.
        target: int64 [B, T]: removed spans, each after its sentinel.
        source_documents: Document of each token.
        target_documents: Document of each token's span.
        lost: bool [B, T]: tokens without loss: padding, or of another document than their span.
    """

    source: np.ndarray
    target: np.ndarray
    source_documents: np.ndarray
    target_documents: np.ndarray
    lost: np.ndarray


def build_span(section: SpanConfig, context: RowContext) -> RowMaker:
    """Raises: ConfigError: The tokenizer has too few sentinels, or no decoder start token."""
    check_tokens(section, context)
    return partial(denoise, span=section, context=context, start_id=start_of(context))


def denoise(rows: TokenRows, span: SpanConfig, context: RowContext, start_id: int | None) -> ModelRows:
    """Returns rows of two stacks, whose decoder begins with `start_id`; None: of one stack."""
    assert rows.source is None, "pairs are not corrupted"
    found = corrupt(rows, span, context)
    if start_id is None:
        return for_one_stack(found, rows)
    return for_two_stacks(found, rows, start_id)


def check_tokens(span: SpanConfig, context: RowContext) -> None:
    """Raises: ConfigError: The tokenizer has too few sentinels, or lacks the mode token."""
    needed = corruption_of(context.lengths.row, span).num_spans
    available = len(context.vocabulary.sentinels)
    if not _is_prefix(span) and needed > available:
        raise ConfigError(
            f"rows of {context.lengths.row} tokens lose {needed} spans (density={span.density}, "
            f"mean_length={span.mean_length}), and the tokenizer has {available} sentinels",
            fix=f"prepare with tokenizer.roles=t5 and tokenizer.sentinels={needed} or more, "
            f"raise mean_length, or lower batch.seq_len",
        )
    mode = span.mode if isinstance(span, DenoiserConfig) else None
    if mode is not None and mode not in context.vocabulary.named:
        fix = "prepare with it among tokenizer.special_tokens, or set its mode to null"
        raise ConfigError(f"the tokenizer has no special token {mode}, the mode of a denoiser", fix=fix)


def corrupt(rows: TokenRows, span: SpanConfig, context: RowContext) -> CorruptedRows:
    """Removes spans from the first `context.lengths.row` tokens of each row.

    The noise of a row depends on the seed and its sample id only, not on the other rows.
    """
    row_len = context.lengths.row
    num_rows = len(rows.tokens_BT)
    tokens = rows.tokens_BT[:, :row_len].astype(np.int64)
    documents = _number(rows, row_len, context.document_mask)
    found = corruption_of(row_len, span)
    if _is_prefix(span):
        noise = np.tile(np.arange(row_len) >= row_len - found.num_noise, (num_rows, 1))
    else:
        noise = draw_noise(found, row_len, context.seed, rows.sample_ids_B)
    # A row begins with a kept token: no span begins in column 0.
    begin = np.nonzero(noise & ~np.roll(noise, 1, axis=1))[1].reshape(num_rows, -1)
    of_span = _at(documents, begin)
    sentinels = np.array(context.vocabulary.sentinels)
    marked = begin[:, :0]
    marks = np.empty((num_rows, 0), dtype=np.int64)
    if not _is_prefix(span):
        # Sentinels count within the document of their span.
        marked = begin
        marks = sentinels[np.minimum(_positions(of_span), len(sentinels) - 1)]

    # A sentinel takes the place of the first token of its span in the source.
    left = ~noise
    left_tokens = tokens.copy()
    np.put_along_axis(left, marked, True, axis=1)
    np.put_along_axis(left_tokens, marked, marks, axis=1)
    out, out_documents, own = _taken(tokens, documents, noise, marked, marks, of_span)

    mode = np.empty((num_rows, 0), dtype=np.int64)
    if isinstance(span, DenoiserConfig) and span.mode is not None:
        mode = np.full((num_rows, 1), context.vocabulary.named[span.mode])
    source = [mode, left_tokens[left].reshape(num_rows, -1)]
    source_documents = [documents[:, : mode.shape[1]], documents[left].reshape(num_rows, -1)]
    end = np.full((num_rows, 1), context.vocabulary.eos)
    last = documents[:, -1:]
    return CorruptedRows(
        source=np.concatenate((*source, end), axis=1),
        target=np.concatenate((out, end), axis=1),
        source_documents=np.concatenate((*source_documents, last), axis=1),
        target_documents=np.concatenate((out_documents, of_span[:, -1:]), axis=1),
        lost=np.concatenate(((own != out_documents) | (own < 0), last < 0), axis=1),
    )


def for_two_stacks(found: CorruptedRows, rows: TokenRows, start_id: int) -> ModelRows:
    """Returns rows of an encoder and a decoder, whose documents begin with `start_id`."""
    inputs = np.empty_like(found.target)
    inputs[:, 1:] = found.target[:, :-1]
    inputs[_begins(found.target_documents)] = start_id
    positions = documents = None
    source = StackRows(found.source)
    # The end token of a source belongs to the last document.
    if found.source_documents.any():
        documents = found.target_documents
        positions = _positions(documents)
        of_source = found.source_documents
        source = replace(source, positions_BT=_positions(of_source), documents_BT=of_source)
    return Batch(
        inputs,
        np.where(found.lost, IGNORE_INDEX, found.target),
        **rows.carried(),
        positions_BT=positions,
        documents_BT=documents,
        source=source,
        num_padding=int((found.source_documents < 0).sum() + (found.target_documents < 0).sum()),
    )


def for_one_stack(found: CorruptedRows, rows: TokenRows) -> ModelRows:
    """Returns rows of a decoder with a bidirectional source as prefix, followed by the target."""
    source_len = found.source.shape[1]
    tokens = np.concatenate((found.source, found.target), axis=1)
    documents = np.concatenate((found.source_documents, found.target_documents), axis=1)
    loss_mask = np.concatenate((np.zeros(found.source.shape, dtype=bool), ~found.lost), axis=1)
    prefix = np.broadcast_to(np.arange(tokens.shape[1]) < source_len, tokens.shape)
    if documents.any():
        # Rows that are not full: move the padding of source and target to the end.
        order = np.argsort(documents < 0, axis=1, kind="stable")
        ordered = (np.take_along_axis(x, order, axis=1) for x in (tokens, documents, loss_mask, prefix))
        tokens, documents, loss_mask, prefix = ordered
    targets = np.where(loss_mask, tokens, IGNORE_INDEX)[:, 1:]
    positions = np.broadcast_to(np.arange(targets.shape[1]), targets.shape)
    return Batch(
        tokens[:, :-1],
        targets,
        **rows.carried(),
        positions_BT=positions if documents.any() else None,
        documents_BT=documents[:, :-1] if documents.any() else None,
        prefix_BT=prefix[:, :-1],
        num_padding=int((documents[:, :-1] < 0).sum()),
    )


def _is_prefix(span: SpanConfig) -> bool:
    return isinstance(span, DenoiserConfig) and span.prefix


def _number(rows: TokenRows, row_len: int, document_mask: bool) -> np.ndarray:
    documents = np.zeros((len(rows.tokens_BT), row_len), dtype=np.int32)
    if document_mask:
        documents = number_documents(*inner_starts(rows, row_len), len(rows.tokens_BT), row_len)[1]
    real = real_tokens(rows, row_len)
    return documents if real is None else np.where(real, documents, np.int32(-1))


def _taken(
    tokens: np.ndarray,
    documents: np.ndarray,
    noise: np.ndarray,
    marked: np.ndarray,
    marks: np.ndarray,
    of_span: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the removed tokens with sentinels, the documents of their spans, and their own."""
    num_rows, num_marks = marked.shape
    before = _at(np.cumsum(noise, axis=1), marked) - 1
    is_mark = np.zeros((num_rows, int(noise[0].sum()) + num_marks), dtype=bool)
    np.put_along_axis(is_mark, before + np.arange(num_marks), True, axis=1)
    out = np.empty(is_mark.shape, dtype=np.int64)
    out[is_mark] = marks.ravel()
    out[~is_mark] = tokens[noise]
    out_documents = _at(of_span, np.maximum(np.cumsum(is_mark, axis=1) - 1, 0))
    own = out_documents.copy()
    own[~is_mark] = documents[noise]
    return out, out_documents, own


def _at(values: np.ndarray, columns: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, columns, axis=1)


def _begins(documents: np.ndarray) -> np.ndarray:
    begins = np.ones(documents.shape, dtype=bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return begins


def _positions(documents: np.ndarray) -> np.ndarray:
    columns = np.arange(documents.shape[1])
    return columns - np.maximum.accumulate(np.where(_begins(documents), columns, 0), axis=1)
