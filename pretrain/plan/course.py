"""The course of a run: its data, checkpoints, jobs under a time limit, and failures."""

import math
import operator
import re
from dataclasses import dataclass

from pretrain.config.train import CheckpointConfig
from pretrain.errors import ConfigError

OPTIMAL_TOKENS = 20
"""Compute-optimal tokens a parameter (Hoffmann et al. 2022, table 3)."""

MTBF_NODE_DAYS = 154.0
"""Mean days between failures of a node of 8 GPUs: 6.50 a thousand node-days on Meta's RSC-1 (Kokolis
et al. 2025, 4; 2.34 on RSC-2). Llama 3's are 264 days apart (Llama Team 2024, 3.3.4)."""

_HEADER_BYTES = 160
"""Bytes of a piece in the header of its file, and of a parameter in the manifest."""

START_S = 300.0
"""From a failure to the next step, besides lost work: scheduler, imports, loading."""


@dataclass(frozen=True, slots=True)
class StoredData:
    """The training split of the run's shard folders."""

    tokens: int  # number of tokens
    shards: int  # number of shards
    token_bytes: int  # bytes of a token, 2 or 4; of images, of a position of the model
    vocab_size: int  # vocabulary of the tokenizer
    labels: tuple[str, ...] = ()  # label names of the index
    has_validation: bool = True  # every folder has a validation split


@dataclass(frozen=True, slots=True)
class Supply:
    """The data that a run reads."""

    needed_tokens: int  # tokens that are read from shards over the whole run
    optimal_tokens: int  # compute-optimal tokens of a model of this size
    bytes_s: float  # bytes a second, read by all ranks together
    epochs: float | None = None  # times that the data are read; None: unknown data
    rows_a_lane: int | None = None  # rows of a lane in an epoch; None: unknown data
    problem: str | None = None  # reason why the data do not suffice; None: they do


def plan_supply(
    *,
    rows: int,
    row_tokens: int,
    total_rows: int,
    step_s: float,
    parameters: int,
    lanes: int,
    stored: StoredData | None,
) -> Supply:
    """Plans the data of a run of `total_rows`, `rows` of them a step; `stored=None`: they are not here."""
    needed = row_tokens * total_rows
    bytes_s = rows * row_tokens * (stored.token_bytes if stored else 2) / step_s
    optimal = OPTIMAL_TOKENS * parameters
    if stored is None:
        return Supply(needed, optimal, bytes_s)
    epoch_rows = stored.tokens // row_tokens
    shared = f"data.lanes={lanes} lanes share {epoch_rows} rows of an epoch"
    problem = None if epoch_rows >= lanes else f"{shared}: lower data.lanes, or prepare more data"
    epochs = needed / max(1, stored.tokens)
    return Supply(needed, optimal, bytes_s, epochs, epoch_rows // lanes, problem)


def checkpoint_bytes(elements: int, tensors: int, ranks: int) -> int:
    """Returns the size of a checkpoint of values in fp32, with headers and manifest."""
    # Each rank has a file, and may have a piece of each tensor.
    return 4 * elements + tensors * (ranks + 1) * _HEADER_BYTES


def checkpoints_at_once(config: CheckpointConfig, last_step: int) -> int:
    """Returns the most checkpoints on disk: newest, unfinished, best, uploaded, permanent ones."""
    permanent = 0
    if config.every_steps and config.keep_every_steps:
        permanent = last_step // math.lcm(config.every_steps, config.keep_every_steps)
    return config.keep + 1 + (config.best is not None) + (config.upload is not None) + permanent


def young_interval(save_s: float, mtbf_s: float) -> float:
    """Returns the seconds between checkpoints that lose least (Young 1974): sqrt(2 C M)."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly_interval(save_s: float, mtbf_s: float) -> float:
    """Returns the same to higher order (Daly 2006, 20)."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


@dataclass(frozen=True, slots=True)
class Failures:
    """The cost of failures."""

    mtbf_s: float  # seconds between failures of the job
    expected: float  # expected number of failures of the run
    lost_share: float  # share of the time that goes to saving, to repeated work, and to starting
    young_s: float  # interval by Young
    daly_s: float  # interval by Daly


def plan_failures(nodes: int, mtbf_node_days: float, save_s: float, interval_s: float, total_s: float) -> Failures:
    """Plans for failures of nodes, any of which ends the job; `interval_s=0`: it has no checkpoints."""
    mtbf_s = mtbf_node_days * 86_400 / nodes
    repeated_s = (interval_s or total_s) / 2 + START_S
    saving = save_s / interval_s if interval_s else 0.0
    return Failures(
        mtbf_s=mtbf_s,
        expected=total_s / mtbf_s,
        lost_share=min(1.0, saving + repeated_s / mtbf_s),
        young_s=young_interval(save_s, mtbf_s),
        daly_s=daly_interval(save_s, mtbf_s),
    )


@dataclass(frozen=True, slots=True)
class Jobs:
    """A run in jobs under a time limit."""

    count: int
    steps_each: int
    lost_s: float  # time of a job that goes to starting, and to the save at its end


def plan_jobs(limit_s: float, total_s: float, step_s: float, save_s: float) -> Jobs:
    """Cuts a run into jobs that start, train and save before their limit; 0: it is too short."""
    lost = START_S + save_s
    steps = int(max(0.0, limit_s - lost) // step_s)
    return Jobs(math.ceil(total_s / (steps * step_s)) if steps else 0, steps, lost)


def parse_time(text: str) -> float:
    """Returns the seconds of `--time`: `1d12h`, `90m`, or Slurm's `2-12:00:00`. Raises: ConfigError."""
    words = text.strip().lower()
    if slurm := re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", words):
        days, rest = slurm.groups()
        parts = [int(part) for part in rest.split(":")]
        # After days the first number is hours; else minutes:seconds, as `sbatch --time` reads it.
        units = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
        return float(int(days or 0) * 86_400 + sum(map(operator.mul, parts, units)))
    units_s = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
    total = 0.0
    if re.fullmatch(r"((\d+(\.\d*)?|\.\d+)[dhms])+", words):
        parts_s = re.findall(r"(?<![\d.])([\d.]+)([dhms])", words)
        total = sum(float(number) * units_s[unit] for number, unit in parts_s)
    if not total:
        problem = f"{text[:40]!r} is no time"
        raise ConfigError(problem, where="--time", fix="write 3d, 12h, 90m or 2-12:00:00")
    return total
