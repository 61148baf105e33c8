"""Row lengths of an objective: tokens read from the data, and tokens that the model gets.

    batch.seq_len --> row: tokens read --> source: input of the encoder (two stacks)
                                       --> target: input of the decoder or of the only stack

The longer of source and target has `batch.seq_len` tokens, or slightly less by rounding: the source
for corrupted text in two stacks, the target for pairs, whose source has `batch.source_len`, and for
images, of which a masked autoencoder encodes a part. Captions are rows of `batch.seq_len` tokens,
whose source is all vectors of an image. In a mixture the objective that lengthens rows most
determines the tokens read; other rows are padded.
"""

from dataclasses import dataclass, replace

from pretrain.config.data import BatchConfig
from pretrain.config.model.patches import ImageSize, PatchesConfig
from pretrain.config.objective import ObjectiveConfig, TaskConfig
from pretrain.kinds.objective import RowLimits, RowShape
from pretrain.kinds.objectives import OBJECTIVES


@dataclass(frozen=True, slots=True)
class RowLengths:
    """Row lengths in tokens."""

    row: int  # length in the data
    target: int  # input length of the decoder or of the only stack
    source: int | None = None  # input length of the encoder of two stacks. None: one stack
    image: ImageSize | None = None  # size of the image of a row. None: text
    before: int = 0  # vectors of an image before its patches


def row_lengths(objective: ObjectiveConfig, batch: BatchConfig, num_stacks: int) -> RowLengths:
    """Returns the row lengths of a run; in a mixture, those that fit every objective.

    Raises: ValueError, where rows of `batch.seq_len` are too short for the objective.
    """
    limits = RowLimits(batch.seq_len, batch.source_len or batch.seq_len, num_stacks)
    row = min(_longest_row(task, limits) for task in objective.tasks)
    shapes = [shape for task in objective.tasks for shape in _shapes(task, row, limits)]
    sources = [shape.source for shape in shapes if shape.source is not None]
    return RowLengths(row, max(shape.target for shape in shapes), max(sources, default=None))


def _longest_row(task: TaskConfig, limits: RowLimits) -> int:
    record = OBJECTIVES[task.kind]
    row = record.longest_row(task.section, limits)
    if row < 2 and record.whole_rows:
        raise ValueError(f"batch.seq_len={limits.seq_len} is too short for objective.kind={task.kind}; raise it")
    return row


def _shapes(task: TaskConfig, row: int, limits: RowLimits) -> list[RowShape]:
    return OBJECTIVES[task.kind].row_shapes(task.section, row, limits)


def image_lengths(lengths: RowLengths, objective: TaskConfig, patches: PatchesConfig) -> RowLengths:
    """Adds the size of images; with hidden patches the number that is read, as in MAE's release.

    Raises: ValueError, where a share of the patches hides all or none.
    """
    source = OBJECTIVES[objective.kind].image_source(objective.section, patches.grid**2, patches.num_before)
    return replace(lengths, source=source, image=patches.image_size, before=patches.num_before)


def padding_share(objective: ObjectiveConfig, batch: BatchConfig, num_stacks: int) -> float:
    """Returns the mean share of padding by objectives of different lengths, not by documents."""
    whole = row_lengths(objective, batch, num_stacks)
    limits = RowLimits(batch.seq_len, batch.source_len or batch.seq_len, num_stacks)
    total = read = 0.0
    for task, weight in zip(objective.tasks, objective.weights, strict=True):
        shapes = _shapes(task, whole.row, limits)
        share = weight / sum(shape.weight for shape in shapes)
        read += sum(share * shape.weight * (shape.target + (shape.source or 0)) for shape in shapes)
        total += weight * (whole.target + (whole.source or 0))
    return 1 - read / total


def describe_rows(objective: ObjectiveConfig, batch: BatchConfig, num_stacks: int) -> str | None:
    """Describes the change of row lengths; None if there is no change."""
    lengths = row_lengths(objective, batch, num_stacks)
    if lengths.target == lengths.row and lengths.source in (None, lengths.row):
        return None
    source = "" if lengths.source is None else f"a source of {lengths.source} and "
    padding = padding_share(objective, batch, num_stacks)
    made = f"rows of {lengths.row} tokens become {source}{lengths.target} tokens"
    return made + (f", {padding:.0%} of it padding" if padding else "")
