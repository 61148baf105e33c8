"""`data:` and `batch:` -- token shards, their order, and the tokens of each step."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from pretrain.config.base import MAX_BATCH_TOKENS, NAME_PATTERN, OFF, Conflicts, OnResume, Section, UserPath
from pretrain.errors import ConfigError, DataError
from pretrain.utils.remote import check_no_secrets

LANES = 64
BLOCK_SAMPLES = 2048
"""Defaults of the shuffle; benchmarks/results.md has its quality and the number of open shards."""


def _without_secrets(path: str) -> str:
    """Returns `path` if it has no credentials: configs end up in logs, checkpoints and trackers."""
    try:
        check_no_secrets(path)
    except DataError as error:
        raise ValueError(str(error)) from None
    return path


Address = Annotated[UserPath, AfterValidator(_without_secrets)]


class SourceConfig(Section):
    """One source of a mixture."""

    name: Annotated[str, OnResume.ALLOW] = Field(pattern=NAME_PATTERN)
    """Name of the source in metrics and in `data.curriculum`."""
    path: Annotated[Address, OnResume.FREE]
    """Folder that `pretrain prepare` wrote, or its address (http, https, s3, gs)."""
    weight: Annotated[float, OnResume.ALLOW] = Field(ge=0)
    """Share of the samples relative to the other weights. 0: unused until the curriculum."""
    repeat: Annotated[bool, OnResume.ALLOW] = True
    """Start over after one reading. False: stop reading it; the other sources take its share."""


class MilestoneConfig(Section):
    """A change of the weights of a mixture."""

    tokens: Annotated[int, OnResume.ALLOW] = Field(ge=1)
    """Tokens of the run after which the weights apply."""
    weights: Annotated[dict[str, float], OnResume.ALLOW]
    """Weight by name of source; a source that is not named is unused."""


Range = Annotated[list[float], Field(min_length=2, max_length=2)]
"""A least and a largest value."""


MAX_MAGNITUDE = 30
"""Largest magnitude of RandAugment."""


class RandAugmentConfig(Section):
    """RandAugment (Cubuk et al. 2020): operations drawn for each image, all at one magnitude."""

    operations: Annotated[int, OFF, OnResume.ALLOW] = Field(default=0, ge=0)
    """Operations applied to an image one after another, N of the paper. 0: off."""
    magnitude: Annotated[float, OnResume.ALLOW] = Field(default=9.0, ge=0, le=MAX_MAGNITUDE)
    """Strength of the operations, M of the paper; 30 is the whole range."""


class ImagesConfig(Section):
    """Sizes and augmentation of images (docs/images.md). Evaluations take the centre crop alone.

    Every random number depends on `seed` and on the number of the sample in the run only.
    """

    resize: Annotated[int | None, OnResume.ALLOW] = Field(default=None, ge=0)
    """Shorter side in pixels before a crop. None: the side of `model.input`. 0: no resizing; an
    image smaller than the crop is an error."""
    crop: Annotated[Literal["center", "random", "random_resized"], OnResume.ALLOW] = "center"
    """Crop in training: the centre, a random place, or a random part of random shape of the stored
    image, which is then resized (Szegedy et al. 2015, 6)."""
    padding: Annotated[int, OnResume.ALLOW] = Field(default=0, ge=0)
    """Black pixels added on each side before the `random` crop."""
    scale: Annotated[Range, OnResume.ALLOW] = Field(default=[0.08, 1.0])
    """Least and largest share of the area, for `random_resized`."""
    ratio: Annotated[Range, OnResume.ALLOW] = Field(default=[0.75, 1.3333])
    """Least and largest width over height, for `random_resized`."""
    flip: Annotated[float, OnResume.ALLOW] = Field(default=0.0, ge=0, le=1)
    """Probability of a mirrored image (left and right) in training."""
    randaugment: RandAugmentConfig = RandAugmentConfig()
    erase: Annotated[float, OnResume.ALLOW] = Field(default=0.0, ge=0, le=1)
    """Probability of a rectangle of noise (Zhong et al. 2020), 2% to 33% of the image."""
    mixup: Annotated[float, OFF, OnResume.ALLOW] = Field(default=0.0, ge=0)
    """Blend each image and its label with a neighbour in the order; the share is drawn from
    Beta(mixup, mixup) (Zhang et al. 2018). 0: off. With `cutmix`: each for half of the images."""
    cutmix: Annotated[float, OFF, OnResume.ALLOW] = Field(default=0.0, ge=0)
    """Replace a rectangle by that of a neighbour, its area drawn likewise (Yun et al. 2019)."""
    interpolation: Annotated[Literal["bilinear", "bicubic"], OnResume.ALLOW] = "bilinear"
    """Filter of resizing, with antialiasing."""

    def _conflicts(self) -> Conflicts:
        for name, most in (("scale", 1.0), ("ratio", float("inf"))):
            low, high = getattr(self, name)
            if not 0 < low <= high <= most:
                yield f"{name}=[{low}, {high}] must be two ascending numbers above 0, at most {most:g}"
            if self.crop != "random_resized" and self.differs(name):
                yield f"{name} goes with crop=random_resized, not {self.crop}", "leave it out"
        if self.padding and self.crop != "random":
            yield f"padding={self.padding} goes with crop=random, not {self.crop}", "leave it out"


class DataConfig(Section):
    """Training data and their order."""

    path: Annotated[Address | None, OnResume.FREE] = None
    """Folder of `pretrain prepare`, or its address (http, https, s3, gs); or `mixture`."""
    mixture: list[SourceConfig] = Field(default_factory=list)
    """Several such folders, sampled by weight; all must have the same tokenizer."""
    curriculum: list[MilestoneConfig] = Field(default_factory=list)
    """Milestones at which the weights of the mixture change, by ascending tokens."""
    packing: Annotated[Literal["concat", "bins", "padded"], OnResume.ALLOW] = "concat"
    """Layout of documents in rows. `concat`: one after another, cut where a row ends. `bins`: whole
    ones side by side (best fit), cut if longer than a row. `padded`: one a row, to the longest of
    the micro-batch."""
    lanes: Annotated[int, OnResume.ALLOW] = Field(default=LANES, ge=1)
    """Number of independent readers that define the sample order, for any number of ranks."""
    block_samples: Annotated[int, OnResume.ALLOW] = Field(default=BLOCK_SAMPLES, ge=1)
    """Samples of one lane that are shuffled together."""
    document_mask: Annotated[bool, OnResume.ALLOW] = True
    """Prevent packed documents from attending to each other."""
    images: ImagesConfig = ImagesConfig()
    on_error: Annotated[Literal["stop", "skip"], OnResume.WARN] = "stop"
    """Reaction to damaged bytes met while reading. `stop`: end the run. `skip`: keep the rows in
    the batch without targets, in the same order. Damage in the index ends every start."""
    max_skipped_rows: Annotated[int, OnResume.FREE] = Field(default=0, ge=0)
    """With `skip`: limit of skipped rows, over all ranks since the start or resumption."""
    cache_dir: Annotated[str, OnResume.FREE] = "~/.cache/pretrain/shards"
    """Cache of shards from an address, shared by runs; on a local disk, for its file locks."""
    cache_gib: Annotated[float, OnResume.FREE] = Field(default=100.0, gt=0)
    """Size limit of the cache in GiB, downloads included. Must hold one block of each source."""
    workers: Annotated[int, OnResume.FREE] = Field(default=1, ge=0)
    """Threads that assemble batches. 0: each batch when it is needed. No effect on the order."""
    prefetch: Annotated[int, OnResume.FREE] = Field(default=4, ge=1)
    """Micro-batches that each rank keeps ready. No effect on the order."""

    @property
    def paths(self) -> list[str]:
        """Folders of all sources."""
        return [source.path for source in self.mixture] if self.path is None else [self.path]

    def _conflicts(self) -> Conflicts:
        if (self.path is None) == (not self.mixture):
            yield "needs path or mixture, and not both"
        if (self.on_error == "skip") != bool(self.max_skipped_rows):
            yield (
                f"on_error={self.on_error} and max_skipped_rows={self.max_skipped_rows} contradict each other",
                "give skip with a limit above 0, or stop with none",
            )
        yield from self._mixture_conflicts([source.name for source in self.mixture])

    def _mixture_conflicts(self, names: list[str]) -> Conflicts:
        if len(set(names)) < len(names):
            yield f"mixture names a source twice: {', '.join(sorted(names))}"
        # A weight of 0 is for a source that the curriculum begins later.
        if self.mixture and not any(source.weight for source in self.mixture):
            yield "mixture has no weight above 0"
        ends = [milestone.tokens for milestone in self.curriculum]
        if any(later <= earlier for earlier, later in pairwise(ends)):
            yield f"curriculum: tokens must ascend, not {ends}"
        for milestone in self.curriculum:
            where = f"curriculum at {milestone.tokens} tokens"
            if unknown := sorted(milestone.weights.keys() - set(names)):
                yield f"{where}: no source {unknown[0]!r} in mixture"
            if not any(weight > 0 for weight in milestone.weights.values()):
                yield f"{where}: no weight above 0"
            if any(weight < 0 for weight in milestone.weights.values()):
                yield f"{where}: a weight is negative"


class StepRows:
    """The rows of each step over all ranks, which follow each other in the order of samples; step 0 is the first.

    `sizes` are (rows of a step, rows of the run after which they apply), ascending from 0. A size
    applies from the first step on that begins after them.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        self._stages: list[tuple[int, int, int]] = []  # first step, rows before it, rows of a step
        for rows, after in sizes:
            step = self.steps_for(after) if self._stages else 0
            before = self.before(step) if self._stages else 0
            if self._stages and self._stages[-1][0] == step:  # no step is left for the size before
                self._stages.pop()
            self._stages.append((step, before, rows))

    def at(self, step: int) -> int:
        """Returns the rows of a step."""
        return self._stages[self._stage(step, 0)][2]

    def before(self, step: int) -> int:
        """Returns the rows of all steps before a step."""
        first, before, rows = self._stages[self._stage(step, 0)]
        return before + (step - first) * rows

    def step_of(self, row: int) -> int:
        """Returns the step of a row, counted from 0 over the run."""
        first, before, rows = self._stages[self._stage(row, 1)]
        return first + (row - before) // rows

    def steps_for(self, rows: int) -> int:
        """Returns the least number of steps with so many rows."""
        return self.step_of(rows - 1) + 1 if rows > 0 else 0

    def _stage(self, value: int, column: int) -> int:
        return max(0, bisect_right(self._stages, value, key=lambda stage: stage[column]) - 1)


class BatchMilestoneConfig(Section):
    """A change of the size of the batch."""

    tokens: Annotated[int, OnResume.ALLOW] = Field(ge=1)
    """Tokens of the run after which the size applies, from the next step on."""
    global_tokens: Annotated[int, OnResume.ALLOW] = Field(ge=1, le=MAX_BATCH_TOKENS)
    """Tokens of one optimizer step over all ranks."""


class ShortRowsConfig(Section):
    """Shorter rows at the beginning of a run."""

    until_tokens: Annotated[int, OnResume.ALLOW] = Field(ge=1)
    """Tokens of the run up to which steps begin with this length."""
    seq_len: Annotated[int, OnResume.ALLOW] = Field(ge=1)
    """Length in tokens that rows are cut to; a divisor of `batch.seq_len`, and shorter."""


class ShortWindowsConfig(Section):
    """Shorter attention windows at the beginning of a run."""

    until_tokens: Annotated[int, OnResume.ALLOW] = Field(ge=1)
    """Tokens of the run up to which steps begin with this window."""
    window: Annotated[int, OnResume.ALLOW] = Field(ge=1)
    """Keys that a query attends to on each visible side, its own included, at most."""


class BatchConfig(Section):
    """Batch of one optimizer step."""

    global_tokens: Annotated[int, OnResume.ALLOW] = Field(ge=1, le=MAX_BATCH_TOKENS)
    """Tokens of one optimizer step over all ranks: rows times `seq_len`."""
    schedule: list[BatchMilestoneConfig] = Field(default_factory=list)
    """Later sizes of `global_tokens`, by ascending tokens: a batch that grows."""
    short_rows: list[ShortRowsConfig] = Field(default_factory=list)
    """Lengths of rows at the beginning, by ascending tokens: the same tokens a step in more rows."""
    short_windows: list[ShortWindowsConfig] = Field(default_factory=list)
    """Attention windows at the beginning, by ascending tokens; a layer's own `window` may be shorter."""
    seq_len: Annotated[int, OnResume.ALLOW] = Field(ge=1)
    """Row length T in tokens: the longest sequence that the model reads."""
    source_len: Annotated[int | None, OnResume.ALLOW] = Field(default=None, ge=1)
    """Length S of a source row in tokens, for data of pairs. None: `seq_len`."""
    micro: Annotated[int, OnResume.WARN] = Field(ge=1)
    """Rows that a rank processes at once; the number of accumulation steps follows from it."""

    @property
    def rows(self) -> int:
        """Rows of the first step over all ranks; of each step, without `schedule`."""
        return self.global_tokens // self.seq_len

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Each size of the batch in tokens, with its key."""
        later = [
            (f"batch.schedule.{place}.global_tokens", one.global_tokens) for place, one in enumerate(self.schedule)
        ]
        return [("batch.global_tokens", self.global_tokens), *later]

    @property
    def common_rows(self) -> int:
        """Largest number of rows that divides every size: what divides over some ranks does in all steps."""
        return gcd(*(tokens // self.seq_len for _, tokens in self.sizes))

    @property
    def steps(self) -> StepRows:
        """Rows of each step."""
        starts = [0, *(one.tokens for one in self.schedule)]
        sizes = [tokens // self.seq_len for _, tokens in self.sizes]
        return StepRows([(rows, -(-start // self.seq_len)) for rows, start in zip(sizes, starts, strict=True)])

    def steps_for(self, tokens: int) -> int:
        """Returns the least number of steps that read so many tokens."""
        return self.steps.steps_for(-(-tokens // self.seq_len))

    def length_at(self, step: int) -> int:
        """Returns the length of the rows that the model reads in a step of the run, by `short_rows`."""
        tokens = self.steps.before(step) * self.seq_len if self.short_rows else 0
        return next((one.seq_len for one in self.short_rows if tokens < one.until_tokens), self.seq_len)

    def window_at(self, step: int) -> int | None:
        """Returns the attention window of a step of the run, by `short_windows`; None: no limit."""
        tokens = self.steps.before(step) * self.seq_len
        return next((one.window for one in self.short_windows if tokens < one.until_tokens), None)

    @property
    def early_stages(self) -> list[int]:
        """Steps from which rows have another length or window, the first step among them."""
        rows, windows = self.short_rows, self.short_windows
        ends = [*(one.until_tokens for one in rows), *(one.until_tokens for one in windows)]
        return sorted({0, *map(self.steps_for, ends)})

    def _conflicts(self) -> Conflicts:
        for key, starts in (
            ("schedule: tokens", [one.tokens for one in self.schedule]),
            ("short_rows: until_tokens", [one.until_tokens for one in self.short_rows]),
            ("short_windows: until_tokens", [one.until_tokens for one in self.short_windows]),
        ):
            if any(later <= earlier for earlier, later in pairwise(starts)):
                yield f"{key} must ascend, not {starts}"
        for one in self.short_rows:
            if self.seq_len % one.seq_len or one.seq_len == self.seq_len:
                yield (
                    f"short_rows: seq_len={one.seq_len} must be a part of "
                    f"batch.seq_len={self.seq_len}, whose rows are cut into whole ones"
                )
        longest = max(self.seq_len, self.source_len or 0)
        for limit in self.short_windows:
            if limit.window >= longest:
                yield (
                    f"short_windows: window={limit.window} hides nothing in rows of {longest} tokens",
                    "use less, or leave it out",
                )


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Division of a global batch: `rows = ranks / sequence x accumulation x micro`.

    It is that of the first step; `steps` has the rows of all of them, which divide alike. None:
    all have as many. `sequence` ranks share their rows, by either key of `parallel`.
    """

    rows: int
    rows_per_rank: int
    micro: int
    accumulation: int
    steps: StepRows | None = None
    sequence: int = 1


def nearest_multiples(number: int, quantum: int) -> str:
    """Returns the positive multiples below and above a number: `96 or 128`."""
    below = number // quantum * quantum
    return " or ".join(str(size) for size in (below, below + quantum) if size)


def plan_batch(
    batch: BatchConfig,
    world_size: int,
    sequence: int = 1,
    experts: int = 1,
    tensor: int = 1,
) -> BatchPlan:
    """Divides the global batch over `world_size` ranks; `sequence x tensor` share the rows of one.

    `experts` ranks share the experts of each layer, whichever rows they have.

    Raises:
        ConfigError: It, or the number of ranks, is not divisible; names the two nearest that are.
    """
    by_key = {"sequence": sequence, "experts": experts, "tensor": tensor}
    for key, shared in by_key.items():
        if world_size % shared:
            raise ConfigError(
                f"parallel.{key}={shared} must divide the number of ranks, {world_size}",
                fix=f"start {nearest_multiples(world_size, shared)} ranks",
            )
    together = sequence * tensor
    if world_size % together:
        raise ConfigError(
            f"parallel.sequence={sequence} x parallel.tensor={tensor} must divide the number of ranks, {world_size}",
            fix=f"start {nearest_multiples(world_size, together)} ranks",
        )
    shares = world_size // together
    quantum = batch.seq_len * batch.micro * shares
    cuts = [f" / parallel.{key} {by_key[key]}" for key in ("sequence", "tensor") if by_key[key] > 1]
    ranks = f"ranks {world_size}" + "".join(cuts)
    for key, tokens in batch.sizes:
        if tokens % quantum:
            raise ConfigError(
                f"{key}={tokens} must be a multiple of "
                f"seq_len {batch.seq_len} x micro {batch.micro} x {ranks} = {quantum}",
                fix=f"use {nearest_multiples(tokens, quantum)}",
            )
    rows_per_rank = batch.rows // shares
    accumulation = rows_per_rank // batch.micro
    steps = batch.steps if batch.schedule else None
    return BatchPlan(batch.rows, rows_per_rank, batch.micro, accumulation, steps, together)
