"""Row lengths of an objective: tokens read from the data, and tokens that the model gets.

    batch.seq_len --> row: tokens read --> source: input of the encoder (two stacks)
                                       --> target: input of the decoder or of the only stack

The longer of source and target has `batch.seq_len` tokens, or slightly less by rounding: the source for
corrupted text in two stacks, the target for pairs, whose source has `batch.source_len`. In a mixture
the objective that lengthens rows most determines the tokens read; rows of the others are padded.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from pretrain.config.data import BatchConfig
from pretrain.config.objective import DenoiserConfig, ObjectiveConfig, SpanConfig, TaskConfig


@dataclass(frozen=True, slots=True)
class RowLengths:
    """Row lengths in tokens.

    Attributes:
        row: Length in the data.
        target: Input length of the decoder or of the only stack.
        source: Input length of the encoder of two stacks. None: one stack.
    """

    row: int
    target: int
    source: int | None = None


@dataclass(frozen=True, slots=True)
class Corruption:
    """Token counts of a row under span corruption.

    Attributes:
        num_noise: Removed tokens.
        num_spans: Spans of removed tokens.
        source: Input of the encoder: remaining tokens, sentinels, end, and the mode token if any.
        target: Predicted tokens: removed tokens, sentinels, end.
    """

    num_noise: int
    num_spans: int
    source: int
    target: int


def corruption_of(row: int, span: SpanConfig) -> Corruption:
    """Counts the tokens of a corrupted row, rounded as in `random_spans_noise_mask` of T5.

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
    """Returns the row lengths of a run; in a mixture, those that fit every objective.

    Args:
        objective: Objective or mixture.
        batch: Lengths that the model should read.
        num_stacks: 1 or 2. Denoisers concatenate source and target in a single stack.

    Raises:
        ValueError: Rows of `batch.seq_len` are too short for the objective.
    """
    tasks = objective.tasks
    row = min(_longest_row(task, batch.seq_len, num_stacks) for task in tasks)
    found = [lengths for task in tasks for _, lengths in _lengths(task, row, batch, num_stacks)]
    sources = [lengths.source for lengths in found if lengths.source is not None]
    return RowLengths(row, max(lengths.target for lengths in found), max(sources) if sources else None)


def padding_share(objective: ObjectiveConfig, batch: BatchConfig, num_stacks: int) -> float:
    """Returns the mean share of padding that is due to objectives of different lengths.

    Padding that depends on documents (of bins, and of fill in the middle) is not counted.
    """
    whole = row_lengths(objective, batch, num_stacks)
    total = read = 0.0
    for task, weight in zip(objective.tasks, objective.weights, strict=True):
        kinds = list(_lengths(task, whole.row, batch, num_stacks))
        share = weight / sum(part for part, _ in kinds)
        read += sum(share * part * (lengths.target + (lengths.source or 0)) for part, lengths in kinds)
        total += weight * (whole.target + (whole.source or 0))
    return 1 - read / total


def describe_rows(objective: ObjectiveConfig, batch: BatchConfig, num_stacks: int) -> str | None:
    """Describes the change of row lengths; None if there is no change."""
    found = row_lengths(objective, batch, num_stacks)
    if found.target == found.row and found.source in (None, found.row):
        return None
    made = f"{found.target} tokens" if found.source is None else f"a source of {found.source} and {found.target} tokens"
    padding = padding_share(objective, batch, num_stacks)
    return f"rows of {found.row} tokens become {made}" + (f", {padding:.0%} of it padding" if padding else "")


def spans_of(task: TaskConfig) -> list[SpanConfig]:
    """Returns the kinds of span corruption of a task: none, one, or one a denoiser."""
    if task.kind == "span":
        return [task.span]
    return [*task.ul2.denoisers] if task.kind == "ul2" else []


def _longest_row(task: TaskConfig, seq_len: int, num_stacks: int) -> int:
    """Returns the longest row whose source and target have at most `seq_len` tokens."""
    if task.kind == "fim":
        row = seq_len - 3 * task.fim.max_documents
    else:
        row = min((_longest_corrupted(span, seq_len, num_stacks) for span in spans_of(task)), default=seq_len)
    if row < 2 and (spans_of(task) or task.kind == "fim"):
        raise ValueError(f"batch.seq_len={seq_len} is too short for objective.kind={task.kind}; raise it")
    return row


def _longest_corrupted(span: SpanConfig, seq_len: int, num_stacks: int) -> int:
    """Returns the longest such row, 1 if there is none.

    Bisection: lengths never decrease with the row, and are at least half of it.
    """
    rows = range(2, 2 * seq_len + 1)
    return 1 + bisect_right(rows, seq_len, key=lambda row: _needed(corruption_of(row, span), num_stacks))


def _needed(found: Corruption, num_stacks: int) -> int:
    # In one stack the last token predicts nothing, and is not read.
    return max(found.source, found.target) if num_stacks == 2 else found.source + found.target - 1


def _lengths(task: TaskConfig, row: int, batch: BatchConfig, num_stacks: int) -> Iterator[tuple[float, RowLengths]]:
    """Yields the weight and the lengths of each kind of rows of a task."""
    if task.kind == "seq2seq":
        yield 1.0, RowLengths(row, batch.seq_len, batch.source_len or batch.seq_len)
    elif task.kind == "fim":
        yield 1.0, RowLengths(row, row + 3 * task.fim.max_documents)
    elif not spans_of(task):
        yield 1.0, RowLengths(row, row)
    for span in spans_of(task):
        found = corruption_of(row, span)
        weight = span.weight if isinstance(span, DenoiserConfig) else 1.0
        if num_stacks == 2:
            yield weight, RowLengths(row, found.target, found.source)
        else:
            yield weight, RowLengths(row, _needed(found, num_stacks))
