"""How long the rows of an objective are: what the data layer reads for what the model gets. Pure arithmetic.

    batch.seq_len  -->  row: tokens that are read     -->  source: what the encoder reads (two stacks)
                                                      -->  target: what the decoder, or the only stack, reads

The longest of source and target is as long as `batch.seq_len` says, or as near below as rounding leaves it; with two
stacks that is the source's side for corrupted text, and the target's for pairs, whose source has `batch.source_len`.
Where objectives are mixed, the one that makes most of a row decides what is read, and the others are padded.
"""

from bisect import bisect_right
from collections.abc import Iterator
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
        ValueError: Rows of `batch.seq_len` are too short for the objective.
    """
    tasks = objective.tasks
    row = min(_longest_row(task, batch.seq_len, num_stacks) for task in tasks)
    found = [lengths for task in tasks for _, lengths in _lengths(task, row, batch, num_stacks)]
    sources = [lengths.source for lengths in found if lengths.source is not None]
    return RowLengths(row, max(lengths.target for lengths in found), max(sources) if sources else None)


def padding_share(objective: ObjectiveConfig, batch: BatchConfig, num_stacks: int) -> float:
    """Returns the mean share of what the model reads that is padding because rows of several kinds are of one length.

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
    """Returns what becomes of rows, in words; None where they stay as long as they are."""
    found = row_lengths(objective, batch, num_stacks)
    if found.target == found.row and found.source in (None, found.row):
        return None
    made = f"{found.target} tokens" if found.source is None else f"a source of {found.source} and {found.target} tokens"
    padding = padding_share(objective, batch, num_stacks)
    return f"rows of {found.row} tokens become {made}" + (f", {padding:.0%} of it padding" if padding else "")


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
    if row < 2 and (spans_of(task) or task.kind == "fim"):
        raise ValueError(f"batch.seq_len={seq_len} is too short for objective.kind={task.kind}; raise it")
    return row


def _longest_corrupted(span: SpanConfig, seq_len: int, num_stacks: int) -> int:
    """Returns 1 where there is none. What a row becomes never shrinks as the row grows, and is never half of it."""
    rows = range(2, 2 * seq_len + 1)
    return 1 + bisect_right(rows, seq_len, key=lambda row: _needed(corruption_of(row, span), num_stacks))


def _needed(found: Corruption, num_stacks: int) -> int:
    # In one stack the last token predicts nothing, and is not read.
    return max(found.source, found.target) if num_stacks == 2 else found.source + found.target - 1


def _lengths(task: TaskConfig, row: int, batch: BatchConfig, num_stacks: int) -> Iterator[tuple[float, RowLengths]]:
    """Yields the lengths that rows of a task have, and how often, in proportion."""
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
