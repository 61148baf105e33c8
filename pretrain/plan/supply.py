"""Whether the data suffice: epochs, lanes, the compute-optimal ratio, and the bandwidth that reading needs."""

from dataclasses import dataclass

OPTIMAL_TOKENS = 20
"""Tokens a parameter at which a given amount of compute is spent best (Hoffmann et al. 2022, table 3)."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What a shard folder holds.

    Attributes:
        tokens: Of its training split.
        shards: Of the same.
        token_bytes: 2 or 4.
        vocab_size: Of its tokenizer.
        labels: That its index names.
    """

    tokens: int
    shards: int
    token_bytes: int
    vocab_size: int
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Supply:
    """What a run takes of its data.

    Attributes:
        needed_tokens: Tokens that are read from shards over the whole run.
        optimal_tokens: That a model of this size wants.
        bytes_s: Read by all ranks together.
        epochs: Times that the data are read; None where they are not known.
        rows_a_lane: Of an epoch; likewise.
        problem: Why the data do not suffice; None: they do.
    """

    needed_tokens: int
    optimal_tokens: int
    bytes_s: float
    epochs: float | None = None
    rows_a_lane: int | None = None
    problem: str | None = None


def plan_supply(
    rows: int, row_tokens: int, steps: int, step_s: float, parameters: int, lanes: int, stored: Stored | None
) -> Supply:
    """Plans what is read.

    Args:
        rows: Of a step.
        row_tokens: That a row is made of, as it is read.
        steps: Of the run.
        step_s: Seconds of one.
        parameters: Of the model.
        lanes: Readers that the order is defined over.
        stored: What there is. None: it is not known.
    """
    needed, size = rows * row_tokens * steps, stored.token_bytes if stored else 2
    optimal, bytes_s = OPTIMAL_TOKENS * parameters, rows * row_tokens * size / step_s
    if stored is None:
        return Supply(needed, optimal, bytes_s)
    a_lane = stored.tokens // row_tokens // lanes
    problem = None
    if not a_lane:
        problem = (
            f"data.lanes={lanes} lanes share {stored.tokens // row_tokens} rows of an epoch: lower data.lanes, "
            f"or prepare more text"
        )
    return Supply(needed, optimal, bytes_s, needed / max(1, stored.tokens), a_lane, problem)
