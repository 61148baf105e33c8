"""`data:` and `batch:` -- token shards, their order, and the tokens of a step."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from pretrain.config.base import OnResume, Section
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


Address = Annotated[str, AfterValidator(_without_secrets)]


class SourceConfig(Section):
    """One source of a mixture."""

    name: Annotated[str, OnResume.ALLOW] = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the source in metrics and in `data.curriculum`."""
    path: Annotated[Address, OnResume.FREE]
    """Folder that `pretrain prepare` wrote, or its address (http, https, s3, gs)."""
    weight: Annotated[float, OnResume.ALLOW] = Field(ge=0)
    """Share of the samples relative to the other weights. 0: unused until the curriculum raises
    it."""
    repeat: Annotated[bool, OnResume.ALLOW] = True
    """Start over after the source has been read once. False: stop reading it then; the other
    sources take over its share."""


class MilestoneConfig(Section):
    """A change of the weights of a mixture."""

    tokens: Annotated[int, OnResume.ALLOW] = Field(ge=1)
    """Tokens of the run after which the weights apply."""
    weights: Annotated[dict[str, float], OnResume.ALLOW]
    """Weight by name of source; a source that is not named is unused."""


class DataConfig(Section):
    """Training data and their order."""

    path: Annotated[Address | None, OnResume.FREE] = None
    """Folder that `pretrain prepare` wrote, or its address (http, https, s3, gs). Set either this
    or `mixture`."""
    mixture: list[SourceConfig] = Field(default_factory=list)
    """Several such folders, sampled by weight; all must have the same tokenizer."""
    curriculum: list[MilestoneConfig] = Field(default_factory=list)
    """Milestones at which the weights of the mixture change, by ascending tokens."""
    packing: Annotated[Literal["concat", "bins", "padded"], OnResume.ALLOW] = "concat"
    """Layout of documents in rows. `concat`: one after another, cut where a row ends. `bins`: whole
    documents side by side (best fit); only a document longer than a row is cut. `padded`: one
    document a row, rows of similar length together, padded to the longest of the micro-batch."""
    lanes: Annotated[int, OnResume.ALLOW] = Field(default=LANES, ge=1)
    """Number of independent readers over which the sample order is defined. Another number gives
    another order; the number of ranks does not change it."""
    block_samples: Annotated[int, OnResume.ALLOW] = Field(default=BLOCK_SAMPLES, ge=1)
    """Samples of one lane that are shuffled together."""
    document_mask: Annotated[bool, OnResume.ALLOW] = True
    """Prevent packed documents from attending to each other."""
    on_error: Annotated[Literal["stop", "skip"], OnResume.WARN] = "stop"
    """Reaction to damaged bytes (CRC32 mismatch, unreadable shard) met while reading. `stop`: end
    the run. `skip`: keep the affected rows in the batch without targets, so that the order of all
    other rows does not change. Damage that the index shows is refused at start in both cases."""
    max_skipped_rows: Annotated[int, OnResume.FREE] = Field(default=0, ge=0)
    """With `skip`: largest number of skipped rows, over all ranks since the run was started or
    resumed; one more ends the run."""
    cache_dir: Annotated[str, OnResume.FREE] = "~/.cache/pretrain/shards"
    """Cache of shards that are read from an address, shared by the processes and runs of a machine.
    Must be on a local disk: it needs file locks."""
    cache_gib: Annotated[float, OnResume.FREE] = Field(default=100.0, gt=0)
    """Size limit of the cache in GiB, downloads in progress included. Must hold one block of each
    source; an error names the minimum."""
    workers: Annotated[int, OnResume.FREE] = Field(default=1, ge=0)
    """Threads that assemble batches. 0: assemble each batch when it is needed. No effect on the
    order."""
    prefetch: Annotated[int, OnResume.FREE] = Field(default=4, ge=1)
    """Micro-batches that each rank keeps ready. No effect on the order."""

    @property
    def paths(self) -> list[str]:
        """Folders of all sources."""
        return [source.path for source in self.mixture] if self.path is None else [self.path]

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        if (self.path is None) == (not self.mixture):
            raise ValueError("needs path or mixture, and not both")
        if (self.on_error == "skip") != bool(self.max_skipped_rows):
            raise ValueError(
                f"on_error={self.on_error} and max_skipped_rows={self.max_skipped_rows} contradict "
                f"each other; give skip with a limit above 0, or stop with none"
            )
        names = [source.name for source in self.mixture]
        if len(set(names)) < len(names):
            raise ValueError(f"mixture names a source twice: {', '.join(sorted(names))}")
        if self.mixture and not any(source.weight for source in self.mixture):
            raise ValueError("mixture has no weight above 0")
        ends = [milestone.tokens for milestone in self.curriculum]
        if any(later <= earlier for earlier, later in pairwise(ends)):
            raise ValueError(f"curriculum: tokens must ascend, not {ends}")
        for milestone in self.curriculum:
            unknown = sorted(milestone.weights.keys() - set(names))
            if unknown or not any(weight > 0 for weight in milestone.weights.values()):
                raise ValueError(
                    f"curriculum at {milestone.tokens} tokens: "
                    + (f"no source {unknown[0]!r} in mixture" if unknown else "no weight above 0")
                )
            if any(weight < 0 for weight in milestone.weights.values()):
                raise ValueError(f"curriculum at {milestone.tokens} tokens: a weight is negative")
        return self


class BatchConfig(Section):
    """The batch of one optimizer step."""

    global_tokens: Annotated[int, OnResume.ALLOW] = Field(ge=1)
    """Tokens of one optimizer step over all ranks: rows times `seq_len`."""
    seq_len: Annotated[int, OnResume.ALLOW] = Field(ge=1)
    """Row length T in tokens: the longest sequence that the model reads."""
    source_len: Annotated[int | None, OnResume.ALLOW] = Field(default=None, ge=1)
    """Length S of a source row in tokens, for data of pairs. None: `seq_len`."""
    micro: Annotated[int, OnResume.WARN] = Field(ge=1)
    """Rows that a rank processes at once; the number of accumulation steps follows from it."""

    @property
    def rows(self) -> int:
        """Rows of one step over all ranks."""
        return self.global_tokens // self.seq_len


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Division of a global batch: `rows = world_size x accumulation x micro`."""

    rows: int
    rows_per_rank: int
    micro: int
    accumulation: int


def plan_batch(batch: BatchConfig, world_size: int) -> BatchPlan:
    """Divides the global batch over `world_size` ranks.

    Raises:
        ConfigError: It is not divisible; names the two nearest sizes that are.
    """
    quantum = batch.seq_len * batch.micro * world_size
    if batch.global_tokens % quantum:
        below = batch.global_tokens // quantum * quantum
        sizes = " or ".join(str(size) for size in (below, below + quantum) if size)
        raise ConfigError(
            f"batch.global_tokens={batch.global_tokens} must be a multiple of "
            f"seq_len {batch.seq_len} x micro {batch.micro} x ranks {world_size} = {quantum}",
            fix=f"use {sizes}",
        )
    rows_per_rank = batch.rows // world_size
    return BatchPlan(batch.rows, rows_per_rank, batch.micro, rows_per_rank // batch.micro)
