"""Whether the data suffice: epochs, lanes, the compute-optimal ratio, and the bandwidth that reading needs."""

import math
from dataclasses import dataclass

from pretrain.config.train import CheckpointConfig

OPTIMAL_TOKENS = 20

"""Tokens a parameter at which a given amount of compute is spent best (Hoffmann et al. 2022, table 3)."""


@dataclass(frozen=True, slots=True)
class StoredData:
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
    rows: int, row_tokens: int, steps: int, step_s: float, parameters: int, lanes: int, stored: StoredData | None
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


# The course of a run over days: checkpoints and their room, jobs of a time limit, failures and the
# work they cost.


MTBF_NODE_DAYS = 154.0

"""Mean days between failures of a node of 8 GPUs: 6.50 a thousand node-days on Meta's RSC-1 (Kokolis et al. 2025, 4;
2.34 on RSC-2). Llama 3's 419 in 54 days on 2,048 nodes are 264 node-days each (Llama Team 2024, 3.3.4)."""

_HEADER_BYTES = 160

"""Of a piece in the header of its file, and of a parameter in the manifest (`checkpoint/preflight.py`)."""

START_S = 300.0

"""From a failure to the next step, besides what is lost: scheduler, imports, loading."""


def checkpoint_bytes(elements: int, tensors: int, ranks: int) -> int:
    """Returns the size of a checkpoint: what it holds in fp32, headers and manifest.

    Args:
        elements: Saved: of parameters (all of the model; of a run of adapters what is trained) and of the optimizer's
            state, which for AdamW is twice as many more.
        tensors: That they are.
        ranks: Each has a file, and may have a piece of each tensor.
    """
    return 4 * elements + tensors * (ranks + 1) * _HEADER_BYTES


def checkpoints_at_once(config: CheckpointConfig, last_step: int) -> int:
    """Returns how many there are at most: those kept, the one being written, the best, and those for good.

    Args:
        config: What is kept, and how often one is made.
        last_step: Where the run ends.
    """
    for_good = 0
    if config.every_steps and config.keep_every_steps:
        for_good = last_step // math.lcm(config.every_steps, config.keep_every_steps)
    return config.keep + 1 + (config.best is not None) + for_good


def young_interval(save_s: float, mtbf_s: float) -> float:
    """Returns the seconds between checkpoints that lose least (Young 1974): sqrt(2 C M)."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly_interval(save_s: float, mtbf_s: float) -> float:
    """Returns the same to higher order (Daly 2006, 20): for a save of less than twice the time between failures."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


@dataclass(frozen=True, slots=True)
class Failures:
    """What failures cost.

    Attributes:
        mtbf_s: Seconds between failures of the job.
        expected: How many over the run.
        lost_share: Share of the time that goes to saving, to work that is done again, and to starting.
        young_s: Interval by Young.
        daly_s: Interval by Daly.
    """

    mtbf_s: float
    expected: float
    lost_share: float
    young_s: float
    daly_s: float


def plan_failures(nodes: int, mtbf_node_days: float, save_s: float, interval_s: float, total_s: float) -> Failures:
    """Plans for a node that fails now and then.

    Args:
        nodes: Any of them ends the job.
        mtbf_node_days: Mean days between failures of one.
        save_s: That a save takes; training waits for less of it, being copied to host memory first.
        interval_s: Between checkpoints; 0: there are none, and a failure loses all.
        total_s: Of the whole run.
    """
    mtbf_s = mtbf_node_days * 86_400 / nodes
    again_s = (interval_s or total_s) / 2 + START_S
    saving = save_s / interval_s if interval_s else 0.0
    return Failures(
        mtbf_s=mtbf_s,
        expected=total_s / mtbf_s,
        lost_share=min(1.0, saving + again_s / mtbf_s),
        young_s=young_interval(save_s, mtbf_s),
        daly_s=daly_interval(save_s, mtbf_s),
    )


@dataclass(frozen=True, slots=True)
class Jobs:
    """A run in jobs of a time limit.

    Attributes:
        count: How many.
        steps_each: Steps of a whole one.
        lost_s: Of each, to starting and to the save at its end.
    """

    count: int
    steps_each: int
    lost_s: float


def plan_jobs(limit_s: float, total_s: float, step_s: float, save_s: float) -> Jobs:
    """Cuts a run into jobs: each starts, trains, and saves before its limit. A limit that is too short gives 0 jobs."""
    lost = START_S + save_s
    steps = int(max(0.0, limit_s - lost) // step_s)
    return Jobs(math.ceil(total_s / (steps * step_s)) if steps else 0, steps, lost)


def parse_time(text: str) -> float:
    """Returns the seconds of a limit: `3d`, `12h`, `90m`, `1d12h`, or Slurm's `2-12:00:00`, `12:00:00`, `90`.

    Raises:
        ValueError: It is none of these.
    """
    units = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
    days, dash, rest = text.strip().lower().rpartition("-")
    if dash or ":" in text:
        parts = [int(part) for part in rest.split(":")]
        if not 1 <= len(parts) <= 3:
            raise ValueError(text)
        # After days the first number is hours; else minutes:seconds, as `sbatch --time` reads it.
        scale = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
        return float(int(days or 0) * 86_400 + sum(part * unit for part, unit in zip(parts, scale, strict=False)))
    if text.strip().isdecimal():
        return 60.0 * int(text)
    total, number = 0.0, ""
    for letter in text.strip().lower():
        if letter in units and number:
            total, number = total + float(number) * units[letter], ""
        else:
            number += letter
    if number or not total:
        raise ValueError(text)
    return total
