"""Span corruption (Raffel et al. 2020, 3.1.4), for an encoder and a decoder.

    row      Thank you for inviting me to your party last week
    source   Thank you <X> me to your party <Y> </s>             what is left, a sentinel for each span
    target   <X> for inviting <Y> last week </s>                 the spans, each behind its sentinel

Every row of a run has the same lengths (config/lengths.py): nothing is padding, nothing is cropped. A denoiser that is
a prefix language model takes out the end of a row, and puts no sentinel.

With a document mask source and target of a document see each other only. A span that reaches into the next document is
the first one's, and what it holds of the next has no loss.
"""

from dataclasses import dataclass

import numpy as np

from pretrain.config.lengths import corruption_of
from pretrain.config.objective import DenoiserConfig, SpanConfig, TaskConfig
from pretrain.errors import ConfigError
from pretrain.objective.contract import RowContext, RowMaker
from pretrain.objective.documents import inner_starts, number_documents
from pretrain.objective.seq2seq import start_of
from pretrain.objective.spans import draw_noise
from pretrain.rows import IGNORE_INDEX, ModelRows, PairRows, SourceRows, TokenRows


@dataclass(frozen=True, slots=True)
class Corrupted:
    """Rows whose spans were taken out.

    Attributes:
        source: int64 [B, S]: what is left.
        target: int64 [B, T]: what was taken out.
        source_documents: int32 [B, S]: number of each token's document in its row.
        target_documents: int32 [B, T]: of each token's span.
        lost: bool [B, T]: tokens of another document than their span's.
    """

    source: np.ndarray
    target: np.ndarray
    source_documents: np.ndarray
    target_documents: np.ndarray
    lost: np.ndarray


def build_span(config: TaskConfig, context: RowContext) -> RowMaker:
    """Raises: ConfigError: The tokenizer has too few sentinels, or no token that a decoder reads first."""
    check_tokens(config.span, context)
    start_id = start_of(context)

    def make(rows: TokenRows | PairRows) -> ModelRows:
        assert isinstance(rows, TokenRows), "pairs are not corrupted"
        found = corrupt(rows, config.span, context)
        return for_two_stacks(found, rows.sample_ids, start_id, context.document_mask)

    return make


def check_tokens(span: SpanConfig, context: RowContext) -> None:
    """Raises: ConfigError: Corrupting a row needs more sentinels than the tokenizer has, or a mode that it lacks."""
    needed, there = corruption_of(context.lengths.row, span).num_spans, len(context.vocabulary.sentinels)
    if not _is_prefix(span) and needed > there:
        raise ConfigError(
            f"rows of {context.lengths.row} tokens lose {needed} spans, and the tokenizer has {there} sentinels",
            fix=f"prepare with tokenizer.sentinels={needed} or more, or raise mean_length",
        )
    if isinstance(span, DenoiserConfig) and span.mode is not None and span.mode not in context.vocabulary.named:
        raise ConfigError(
            f"the tokenizer has no special token {span.mode!r}, the mode of a denoiser",
            fix="prepare with it among tokenizer.special_tokens, or set its mode to null",
        )


def corrupt(rows: TokenRows, span: SpanConfig, context: RowContext) -> Corrupted:
    """Takes spans out of the first `context.lengths.row` tokens of each row."""
    row_len, num_rows = context.lengths.row, len(rows.tokens)
    tokens = rows.tokens[:, :row_len].astype(np.int64)
    documents = number_documents(*inner_starts(rows, row_len), num_rows, row_len)[1]
    found = corruption_of(row_len, span)
    if _is_prefix(span):
        noise = np.tile(np.arange(row_len) >= row_len - found.num_noise, (num_rows, 1))
        starts = np.zeros_like(noise)
    else:
        noise = draw_noise(found, row_len, context.seed, rows.sample_ids)
        starts = noise & ~np.roll(noise, 1, axis=1)  # a row begins with what is kept
    # The column that each token of source and target stands at, or whose span a sentinel stands for.
    left = np.nonzero(~noise | starts)[1].reshape(num_rows, -1)
    out = np.repeat(np.tile(np.arange(row_len), num_rows), (noise.astype(int) + starts).ravel()).reshape(num_rows, -1)
    at_sentinel = np.zeros(out.shape, dtype=bool)
    at_sentinel[:, :-1] = out[:, :-1] == out[:, 1:]
    sentinels = np.array([*context.vocabulary.sentinels, -1])[np.cumsum(starts, axis=1) - 1]
    left_tokens = _at(np.where(starts, sentinels, tokens), left)
    out_tokens = np.where(at_sentinel, _at(sentinels, out), _at(tokens, out))
    begin = np.maximum.accumulate(np.where(noise & ~np.roll(noise, 1, axis=1), np.arange(row_len), 0), axis=1)
    of_span = _at(documents, _at(begin, out))
    end = np.full((num_rows, 1), context.vocabulary.eos)
    mode = np.full((num_rows, 0), 0)
    if isinstance(span, DenoiserConfig) and span.mode is not None:
        mode = np.full((num_rows, 1), context.vocabulary.named[span.mode])
    first, last = np.zeros(mode.shape, dtype=np.int64), np.full(end.shape, row_len - 1)
    return Corrupted(
        source=np.concatenate((mode, left_tokens, end), axis=1),
        target=np.concatenate((out_tokens, end), axis=1),
        source_documents=_at(documents, np.concatenate((first, left, last), axis=1)),
        target_documents=np.concatenate((of_span, of_span[:, -1:]), axis=1),
        lost=np.concatenate((_at(documents, out) != of_span, np.zeros(end.shape, dtype=bool)), axis=1),
    )


def for_two_stacks(found: Corrupted, sample_ids: np.ndarray, start_id: int, document_mask: bool) -> ModelRows:
    """Returns rows of an encoder, and of a decoder that begins each document with `start_id`."""
    targets, inputs = found.target, np.empty_like(found.target)
    inputs[:, 1:] = targets[:, :-1]
    inputs[:, 0] = start_id
    if not (document_mask and found.source_documents.any()):
        return ModelRows(inputs, targets, targets.size, sample_ids, source=SourceRows(found.source))
    inputs[_begins(found.target_documents)] = start_id
    targets = np.where(found.lost, IGNORE_INDEX, targets)
    return ModelRows(
        inputs=inputs,
        targets=targets,
        num_targets=int((targets != IGNORE_INDEX).sum()),
        sample_ids=sample_ids,
        positions=_positions(found.target_documents),
        documents=found.target_documents,
        source=SourceRows(found.source, _positions(found.source_documents), found.source_documents),
    )


def _is_prefix(span: SpanConfig) -> bool:
    return isinstance(span, DenoiserConfig) and span.prefix


def _at(values: np.ndarray, columns: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, columns, axis=1)


def _begins(documents: np.ndarray) -> np.ndarray:
    begins = np.ones(documents.shape, dtype=bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return begins


def _positions(documents: np.ndarray) -> np.ndarray:
    """Returns the place of each token in its document, int64."""
    columns = np.arange(documents.shape[1])
    return columns - np.maximum.accumulate(np.where(_begins(documents), columns, 0), axis=1)
