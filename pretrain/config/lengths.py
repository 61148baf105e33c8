"""How long the rows of an objective are: what the data layer reads for what the model gets. Pure arithmetic.

    batch.seq_len  -->  row: tokens that are read     -->  source: what the encoder reads (two stacks)
                                                      -->  target: what the decoder, or the only stack, reads

The longest of source and target is as long as `batch.seq_len` says; with two stacks that is the source's side for
corrupted text, and the target's for pairs, whose source has `batch.source_len`.
"""

from dataclasses import dataclass

from pretrain.config.data import BatchConfig
from pretrain.config.objective import DenoiserConfig, ObjectiveConfig, SpanConfig, TaskConfig


@dataclass(frozen=True, slots=True)
class RowLengths:
    """Tokens of a row, at the stages that it passes.

    Attributes:
        row: As it is read.
        target: As the decoder reads it, or the only stack.
        source: As the encoder of two stacks reads it. None: one stack.
    """

    row: int
    target: int
    source: int | None = None


@dataclass(frozen=True, slots=True)
class Corruption:
    """What span corruption makes of a row.

    Attributes:
        num_noise: Tokens that are taken out.
        num_spans: Spans that they lie in.
        source: Tokens that the encoder reads: what is left, a sentinel a span, the end; and the mode, if there is one.
        target: Tokens that are predicted: what was taken out, a sentinel a span, the end.
    """

    num_noise: int
    num_spans: int
    source: int
    target: int


def corruption_of(row: int, span: SpanConfig) -> Corruption:
    """Counts what corrupting a row gives, rounded as the reference does (`random_spans_noise_mask` of T5).

    A prefix language model keeps the beginning of a row as its source, without a sentinel.
    """
    is_prefix = isinstance(span, DenoiserConfig) and span.prefix
    num_noise = min(max(round(row * span.density), 1), row - 1)
    num_spans = 1 if is_prefix else max(round(num_noise / span.mean_length), 1)
    num_spans = min(num_spans, row - num_noise)
    sentinels = 0 if is_prefix else num_spans
    mode = int(isinstance(span, DenoiserConfig) and span.mode is not None)
    return Corruption(
        num_noise=num_noise,
        num_spans=num_spans,
        source=row - num_noise + sentinels + 1 + mode,
        target=num_noise + sentinels + 1,
    )


def row_lengths(objective: ObjectiveConfig, batch: BatchConfig, num_stacks: int) -> RowLengths:
    """Returns the lengths of a run's rows: those of its objective, or what holds those of each in a mixture.

    Args:
        objective: With everything that changes lengths.
        batch: What the model shall read.
        num_stacks: 1 or 2: denoisers put what they make in two sequences, or in one after another.

    Raises:
        ValueError: Rows of `batch.seq_len` are too short to be corrupted.
    """
    tasks = objective.tasks
    row = min(_longest_row(task, batch.seq_len, num_stacks) for task in tasks)
    found = [_lengths(task, row, batch, num_stacks) for task in tasks]
    sources = [lengths.source for lengths in found if lengths.source is not None]
    return RowLengths(row, max(lengths.target for lengths in found), max(sources) if sources else None)


def spans_of(task: TaskConfig) -> list[SpanConfig]:
    """Returns how a task corrupts rows: not at all, in one way, or as each of its denoisers does."""
    if task.kind == "span":
        return [task.span]
    return [*task.ul2.denoisers] if task.kind == "ul2" else []


def _longest_row(task: TaskConfig, seq_len: int, num_stacks: int) -> int:
    """Returns the longest row of which nothing that the model reads is longer than `seq_len`."""
    if task.kind == "fim":
        row = seq_len - 3 * task.fim.max_documents
    else:
        row = min((_longest_corrupted(span, seq_len, num_stacks) for span in spans_of(task)), default=seq_len)
    if row < 2:
        raise ValueError(f"batch.seq_len={seq_len} is too short for objective.kind={task.kind}; raise it")
    return row


def _longest_corrupted(span: SpanConfig, seq_len: int, num_stacks: int) -> int:
    row = 2
    while _needed(corruption_of(row + 1, span), num_stacks) <= seq_len:
        row += 1
    return row if _needed(corruption_of(row, span), num_stacks) <= seq_len else 0


def _needed(found: Corruption, num_stacks: int) -> int:
    # In one stack the last token predicts nothing, and is not read.
    return max(found.source, found.target) if num_stacks == 2 else found.source + found.target - 1


def _lengths(task: TaskConfig, row: int, batch: BatchConfig, num_stacks: int) -> RowLengths:
    found = [corruption_of(row, span) for span in spans_of(task)]
    if found and num_stacks == 2:
        return RowLengths(row, max(one.target for one in found), max(one.source for one in found))
    if task.kind == "seq2seq":
        return RowLengths(row, batch.seq_len, batch.source_len or batch.seq_len)
    return RowLengths(row, batch.seq_len)
