"""Row lengths of an objective: tokens read from the data, and tokens that the model gets.

    batch.seq_len --> row: tokens read --> source: input of the encoder (two stacks)
                                       --> target: input of the decoder or of the only stack

The longer of source and target has `batch.seq_len` tokens, or slightly less by rounding: the source
for corrupted text in two stacks, the target for pairs, whose source has `batch.source_len`, and for
images, of which a masked autoencoder encodes a part. Captions are rows of `batch.seq_len` tokens,
whose source is all vectors of an image. In a mixture the objective that lengthens rows most
determines the tokens read; other rows are padded.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pretrain.config.data import BatchConfig
from pretrain.config.model.patches import ImageSize, PatchesConfig
from pretrain.config.objective import ObjectiveConfig, TaskConfig
from pretrain.kinds.objectives.span import SpanConfig
from pretrain.kinds.objectives.ul2 import DenoiserConfig


@dataclass(frozen=True, slots=True)
class RowLengths:
    """Row lengths in tokens."""

    row: int  # length in the data
    target: int  # input length of the decoder or of the only stack
    source: int | None = None  # input length of the encoder of two stacks. None: one stack
    image: ImageSize | None = None  # size of the image of a row. None: text
    before: int = 0  # vectors of an image before its patches


@dataclass(frozen=True, slots=True)
class Corruption:
    """Token counts of a row under span corruption."""

    num_noise: int  # removed tokens
    num_spans: int  # spans of removed tokens
    source: int  # input of the encoder: remaining tokens, sentinels, end, and the mode token if any
    target: int  # predicted tokens: removed tokens, sentinels, end

    def read(self, num_stacks: int) -> int:
        """Returns the tokens of the longest input."""
        # In one stack the last token predicts nothing, and is not read.
        return max(self.source, self.target) if num_stacks == 2 else self.source + self.target - 1


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

    Raises: ValueError, where rows of `batch.seq_len` are too short for the objective.
    """
    tasks = objective.tasks
    row = min(_longest_row(task, batch.seq_len, num_stacks) for task in tasks)
    found = [lengths for task in tasks for _, lengths in _lengths(task, row, batch, num_stacks)]
    sources = [lengths.source for lengths in found if lengths.source is not None]
    return RowLengths(row, max(lengths.target for lengths in found), max(sources, default=None))


def image_lengths(lengths: RowLengths, objective: TaskConfig, patches: PatchesConfig) -> RowLengths:
    """Adds the size of images; with hidden patches the number that is read, as in MAE's release.

    Raises: ValueError, where a share of the patches hides all or none.
    """
    source = patches.positions if objective.kind == "captions" else None
    if objective.kind == "masked_patches":
        rate, number = objective.section.rate, patches.grid**2
        visible = int(number * (1 - rate))
        if not 0 < visible < number:
            seen = f"{visible} of {number} patches visible"
            what = f"objective.masked_patches.rate={rate} leaves {seen}"
            raise ValueError(f"{what}; choose one that hides some, and not all")
        source = patches.num_before + visible
    return replace(lengths, source=source, image=patches.image_size, before=patches.num_before)


def padding_share(objective: ObjectiveConfig, batch: BatchConfig, num_stacks: int) -> float:
    """Returns the mean share of padding by objectives of different lengths, not by documents."""
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
    source = "" if found.source is None else f"a source of {found.source} and "
    padding = padding_share(objective, batch, num_stacks)
    made = f"rows of {found.row} tokens become {source}{found.target} tokens"
    return made + (f", {padding:.0%} of it padding" if padding else "")


def _spans_of(task: TaskConfig) -> list[SpanConfig]:
    """Returns the kinds of span corruption of a task: none, one, or one a denoiser."""
    if task.kind == "span":
        return [task.section]
    return [*task.section.denoisers] if task.kind == "ul2" else []


def _longest_row(task: TaskConfig, seq_len: int, num_stacks: int) -> int:
    """Returns the longest row whose source and target have at most `seq_len` tokens."""
    if task.kind == "fim":
        row = seq_len - 3 * task.section.max_documents
    else:
        corrupted = (_longest_corrupted(span, seq_len, num_stacks) for span in _spans_of(task))
        row = min(corrupted, default=seq_len)
    if row < 2 and (_spans_of(task) or task.kind == "fim"):
        short = f"batch.seq_len={seq_len} is too short for objective.kind={task.kind}"
        raise ValueError(f"{short}; raise it")
    return row


def _longest_corrupted(span: SpanConfig, seq_len: int, num_stacks: int) -> int:
    """Returns the longest such row, 1 if there is none."""
    # Lengths never decrease with the row, and are at least half of it.
    rows = range(2, 2 * seq_len + 1)
    return 1 + bisect_right(rows, seq_len, key=lambda row: corruption_of(row, span).read(num_stacks))


def _lengths(task: TaskConfig, row: int, batch: BatchConfig, num_stacks: int) -> Iterator[tuple[float, RowLengths]]:
    """Yields the weight and the lengths of each kind of rows of a task."""
    if task.kind == "seq2seq":
        yield 1.0, RowLengths(row, batch.seq_len, batch.source_len or batch.seq_len)
    elif task.kind == "fim":
        yield 1.0, RowLengths(row, row + 3 * task.section.max_documents)
    elif not _spans_of(task):
        yield 1.0, RowLengths(row, row)
    for span in _spans_of(task):
        found = corruption_of(row, span)
        weight = span.weight if isinstance(span, DenoiserConfig) else 1.0
        if num_stacks == 2:
            yield weight, RowLengths(row, found.target, found.source)
        else:
            yield weight, RowLengths(row, found.read(num_stacks))
