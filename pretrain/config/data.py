"""`data:` and `batch:` -- which token shards, in what order, and how many tokens a step takes."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from pretrain.config.base import Section
from pretrain.errors import ConfigError, DataError
from pretrain.utils.remote import check_no_secrets

LANES = 64
BLOCK_SAMPLES = 2048
"""Defaults of the shuffle: how well they mix, and how many shards they keep open, is in benchmarks/results.md."""


def _without_secrets(path: str) -> str:
    """Returns `path`, a folder or an address without credentials: a config is written down in many places."""
    try:
        check_no_secrets(path)
    except DataError as error:
        raise ValueError(str(error)) from None
    return path


Address = Annotated[str, AfterValidator(_without_secrets)]


class SourceConfig(Section):
    """One source of a mixture.

    Attributes:
        name: What metrics and `data.curriculum` call it.
        path: Folder that `pretrain prepare` wrote.
        weight: Share of the samples, in proportion to the others'; 0: it rests until the curriculum wakes it.
        repeat: Begin again when it has been read once. False: it rests from there on, and the others have its share.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    path: Address
    weight: float = Field(ge=0)
    repeat: bool = True


class MilestoneConfig(Section):
    """A change of a mixture's weights.

    Attributes:
        tokens: Tokens of the run after which the weights hold.
        weights: Weight by name of source; one that is not named rests.
    """

    tokens: int = Field(ge=1)
    weights: dict[str, float]


class DataConfig(Section):
    """Which tokens are trained on, and in what order.

    Attributes:
        path: Folder that `pretrain prepare` wrote, or its address (http, https, s3, gs). This, or `mixture`.
        mixture: Several such folders, of one tokenizer, by weight.
        curriculum: Milestones at which the weights of the mixture change, ascending.
        packing: How documents come into rows. `concat`: one after another, cut where a row ends. `bins`: whole ones
            side by side, best fit; only what is longer than a row is cut. `padded`: one document a row, rows of similar
            length together, as many columns as the longest of a micro-batch has.
        lanes: Number of independent readers over which the order is defined. Part of a run's meaning: another number
            is another order. The world size is not.
        block_samples: Samples of one lane that are shuffled together.
        document_mask: Packed documents cannot attend to each other.
        on_error: What is done about bytes that turn out to be damaged (a member's CRC32, a shard that cannot be read)
            while a run reads them. `stop`: the run ends. `skip`: their rows keep their places and have no targets, so
            that all other rows come when they would have come. What an index can tell is refused at start either way.
        max_skipped_rows: With `skip`: more rows than this, over all ranks since the run was started or resumed, end it
            after all.
        cache_dir: Where shards of an address are kept; processes and runs of a machine share it. On a local disk: it
            needs file locks.
        cache_gib: All that may be kept there, downloads in progress included. At least what a block of each source
            reads at once; an error says how much.
        workers: Threads that assemble batches; 0: none, each is made when it is needed. No effect on order.
        prefetch: Micro-batches kept ready a rank. No effect on order.
    """

    path: Address | None = None
    mixture: list[SourceConfig] = Field(default_factory=list)
    curriculum: list[MilestoneConfig] = Field(default_factory=list)
    packing: Literal["concat", "bins", "padded"] = "concat"
    lanes: int = Field(default=LANES, ge=1)
    block_samples: int = Field(default=BLOCK_SAMPLES, ge=1)
    document_mask: bool = True
    on_error: Literal["stop", "skip"] = "stop"
    max_skipped_rows: int = Field(default=0, ge=0)
    cache_dir: str = "~/.cache/pretrain/shards"
    cache_gib: float = Field(default=100.0, gt=0)
    workers: int = Field(default=1, ge=0)
    prefetch: int = Field(default=4, ge=1)

    @property
    def paths(self) -> list[str]:
        """The folder, or those of the mixture."""
        return [source.path for source in self.mixture] if self.path is None else [self.path]

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        if (self.path is None) == (not self.mixture):
            raise ValueError("needs path or mixture, and not both")
        if (self.on_error == "skip") != bool(self.max_skipped_rows):
            raise ValueError(
                f"on_error={self.on_error} and max_skipped_rows={self.max_skipped_rows} contradict each other; "
                f"give skip with a limit above 0, or stop with none"
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
    """The batch of one optimizer step.

    Attributes:
        global_tokens: Tokens a step, over all ranks: rows times `seq_len`.
        seq_len: Tokens of a row, T: the longest that the model reads (config/lengths.py).
        source_len: Tokens of a source row, S, where the data are pairs. None: as `seq_len`.
        micro: Rows a rank runs at once; accumulation follows from it.
    """

    global_tokens: int = Field(ge=1)
    seq_len: int = Field(ge=1)
    source_len: int | None = Field(default=None, ge=1)
    micro: int = Field(ge=1)

    @property
    def rows(self) -> int:
        """Rows a step, over all ranks."""
        return self.global_tokens // self.seq_len


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How one global batch is cut up: `rows = world_size x accumulation x micro`."""

    rows: int
    rows_per_rank: int
    micro: int
    accumulation: int


def plan_batch(batch: BatchConfig, world_size: int) -> BatchPlan:
    """Cuts the global batch over `world_size` ranks.

    Raises:
        ConfigError: It does not divide; names the two nearest sizes that do.
    """
    quantum = batch.seq_len * batch.micro * world_size
    if batch.global_tokens % quantum:
        below = batch.global_tokens // quantum * quantum
        sizes = " or ".join(str(size) for size in (below, below + quantum) if size)
        raise ConfigError(
            f"batch.global_tokens={batch.global_tokens} must be a multiple of seq_len {batch.seq_len} x micro "
            f"{batch.micro} x ranks {world_size} = {quantum}",
            fix=f"use {sizes}",
        )
    rows_per_rank = batch.rows // world_size
    return BatchPlan(batch.rows, rows_per_rank, batch.micro, rows_per_rank // batch.micro)
