"""`data:` and `batch:` -- which token shards, in what order, and how many tokens a step takes."""

from dataclasses import dataclass

from pydantic import Field

from pretrain.config.base import Section
from pretrain.errors import ConfigError


class DataConfig(Section):
    """Which tokens are trained on, and in what order.

    Attributes:
        path: Folder that `pretrain prepare` wrote.
        lanes: Number of independent readers over which the order is defined. Part of a run's meaning: another number
            is another order. The world size is not.
        block_samples: Samples of one lane that are shuffled together.
        document_mask: Packed documents cannot attend to each other.
        workers: Threads that assemble batches. No effect on order.
        prefetch: Micro-batches kept ready a rank. No effect on order.
    """

    path: str
    lanes: int = Field(default=16, ge=1)
    block_samples: int = Field(default=8192, ge=1)
    document_mask: bool = True
    workers: int = Field(default=1, ge=1)
    prefetch: int = Field(default=4, ge=1)


class BatchConfig(Section):
    """The batch of one optimizer step.

    Attributes:
        global_tokens: Tokens a step, over all ranks.
        seq_len: Tokens a row, T.
        micro: Rows a rank runs at once; accumulation follows from it.
    """

    global_tokens: int = Field(ge=1)
    seq_len: int = Field(ge=1)
    micro: int = Field(ge=1)


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
    rows = batch.global_tokens // batch.seq_len
    rows_per_rank = rows // world_size
    return BatchPlan(rows, rows_per_rank, batch.micro, rows_per_rank // batch.micro)
