"""The search for layouts that fit, the scaling curve, and the check before a job is submitted."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from pydantic import ValidationError

from pretrain.config.engine import EngineConfig
from pretrain.config.run import RunConfig
from pretrain.errors import ConfigError
from pretrain.plan.cluster import Cluster
from pretrain.plan.memory import host_bytes, largest_micro, memory_limit, rank_memory
from pretrain.plan.roofline import Rate, predict_rate
from pretrain.plan.task import ParallelLayout, TrainingTask, changes, task_of
from pretrain.utils.units import plural

GIB = 2**30


@dataclass(frozen=True, slots=True)
class LayoutCandidate:
    """A layout that fits, its predicted speed, and the memory of one rank."""

    layout: ParallelLayout
    rate: Rate
    memory_bytes: int


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, ascending."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})


def _engines(config: RunConfig, ranks: int) -> Iterator[EngineConfig]:
    """Yields the variants of an engine that the config accepts: stages, checkpointing, offload.

    Its own stage comes first, and stages that are one engine on so many ranks are one variant.
    """
    values = config.model_dump(mode="json", by_alias=True)
    asked = config.engine.zero_stage
    further = [] if config.engine.is_replicated else [stage for stage in range(4) if stage != asked]
    seen = []
    places = (("none", "none"), ("cpu", "none"), ("cpu", "cpu"))
    for stage, (optimizer, params), mode in product([asked, *further], places, ("none", "selective", "full")):
        update = {
            "zero_stage": stage,
            "activation_checkpointing": mode,
            "offload_optimizer": optimizer,
            "offload_params": params,
        }
        # Refused variants, such as ZeRO 0 of an optimizer in host memory.
        with suppress(ValidationError):
            engine = RunConfig.model_validate(values | {"engine": values["engine"] | update}).engine
            if (built := engine.on(ranks)) not in seen:
                seen.append(built)
                yield engine


def search(config: RunConfig, task: TrainingTask, cluster: Cluster, count: int = 5) -> list[LayoutCandidate]:
    """Returns the best `count` layouts of a config, fastest first.

    For each variant of the engine the two largest micro-batches that fit are tried: a smaller one
    is never faster. Of layouts as fast to within half a per cent, the smallest comes first.
    """
    groups = math.lcm(task.row_ranks, task.experts, config.engine.zero_hpz)
    rows = config.batch.common_rows * task.row_ranks
    if rows % cluster.size or cluster.size % groups:
        return []
    per_rank = rows // cluster.size
    limit = memory_limit(cluster)
    layouts = []
    for variant in _engines(config, cluster.size):
        most = largest_micro(task, variant, cluster, per_rank)
        for micro in [size for size in divisors(per_rank) if size <= most][-2:]:
            layout = ParallelLayout(variant, micro, per_rank // micro)
            needed = rank_memory(task, layout, cluster).total
            if needed <= limit:
                layouts.append(LayoutCandidate(layout, predict_rate(task, layout, cluster), needed))
    fastest = min((one.rate.step_s for one in layouts), default=1.0)
    layouts.sort(key=lambda one: (round(one.rate.step_s / fastest / 0.005), one.memory_bytes))
    return layouts[:count]


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """One cluster size of the scaling curve."""

    nodes: int  # number of nodes
    ranks: int  # number of ranks
    micro: int = 0  # rows of a micro-batch: the most that fits and divides, at most the config's
    accumulation: int = 0  # micro-batches of a step
    rate: Rate | None = None  # predicted speed. None: nothing fits, or the batch does not divide
    efficiency: float = 0.0  # tokens a second and rank, over those of the first point with a rate
    why: str = ""  # reason for a missing rate


def parse_sweep(text: str) -> list[int]:
    """Returns the nodes of `nodes=1..512`, each twice the one before. Raises: ConfigError."""
    form = re.fullmatch(r"nodes=(\d+)\.\.(\d+)", text, re.ASCII)
    first, last = map(int, form.groups()) if form else (0, 0)
    if not 0 < first <= last:
        fix = "write --sweep nodes=1..512"
        raise ConfigError(f"{text!r} is no sweep", where="--sweep", fix=fix)
    return [first << doublings for doublings in range((last // first).bit_length())]


def sweep(config: RunConfig, task: TrainingTask, cluster: Cluster, nodes: Sequence[int]) -> list[ScalingPoint]:
    """Predicts the same global batch on each number of nodes, at the config's ZeRO stage."""
    points: list[ScalingPoint] = []
    first = None  # tokens a second and rank
    for count in nodes:
        there = replace(cluster, nodes=count)
        rows = config.batch.common_rows * task.row_ranks  # as if each rank had rows of its own
        point = ScalingPoint(count, there.size)
        wanted = min(config.batch.micro, rows // there.size)
        most = largest_micro(task, config.engine, there, wanted)
        shared = {f"parallel.{key}": getattr(task, key) for key in ("sequence", "experts", "tensor")}
        shared["engine.zero_hpz"] = config.engine.zero_hpz
        uneven = [f"{key}={ranks}" for key, ranks in shared.items() if there.size % ranks]
        if uneven:
            point = replace(point, why=f"{uneven[0]} does not divide {there.size} ranks")
        elif rows % there.size:
            over = f"{there.size} ranks" + (f", {task.row_ranks} a row" if task.row_ranks > 1 else "")
            why = f"{config.batch.common_rows} rows a step do not divide over {over}"
            point = replace(point, why=why)
        elif not most:
            point = replace(point, why="not one row fits")
        else:
            micro = max(size for size in divisors(rows // there.size) if size <= most)
            layout = ParallelLayout(config.engine, micro, rows // there.size // micro)
            rate = predict_rate(task, layout, there)
            each = rate.tokens_s / there.size
            first = first or each
            point = ScalingPoint(count, there.size, micro, layout.accumulation, rate, each / first)
        points.append(point)
    return points


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that would end a job in its first minute, or change its course.

    A launcher refuses the job unless forced, or warns: it refuses a batch always, memory where the
    plan was calibrated on such a GPU, and others never.
    """

    # `batch`: it does not divide over the ranks. `memory`: it is predicted not to fit. `nodes`: ranks
    # that should be on one node are not. `schedule`: it is longer than the run
    kind: str
    what: str  # problem, with its number
    fix: str  # nearest layout that fits
    refuses: bool = True

    def error(self) -> ConfigError:
        """Returns it as an error for the user."""
        return ConfigError(self.what, fix=self.fix)


def check_fits(config: RunConfig, cluster: Cluster, task: TrainingTask | None = None) -> list[Problem]:
    """Returns the problems of a config on a cluster. `task=None`: with an assumed vocabulary."""
    task = task or task_of(config)
    if config.engine.kind == "single" and cluster.size > 1:
        text = f"engine.kind=single is one process, not {cluster.size}"
        return [Problem("batch", text, "use engine.kind=deepspeed")]
    try:
        plan = config.plan_ranks(cluster.size)
    except ConfigError as error:
        return [Problem("batch", error.what, f"{error.fix}{_other_micro(config, cluster)}")]
    across = config.parallel.across_nodes(cluster.size, cluster.per_node)
    problems = [Problem("nodes", slow, fix, refuses=False) for slow, fix in across]
    if cut := config.shortened():
        problems.append(Problem("schedule", *cut, refuses=False))
    layout = ParallelLayout(config.engine, plan.micro, plan.accumulation).on(cluster.size)
    needed = rank_memory(task, layout, cluster).total
    limit = memory_limit(cluster)
    if needed <= limit:
        return problems
    measured = cluster.calibration
    device = cluster.gpu.name if measured is None else f"{measured.device}, as measured"
    text = (
        f"a rank needs {needed / GIB:.1f} GiB, of the {limit / GIB:.1f} GiB of {device}, with "
        f"batch.micro={plan.micro} at ZeRO stage {layout.engine.zero_stage} on "
        f"{plural(cluster.size, 'rank')}"
    )
    return [*problems, Problem("memory", text, _nearest(config, task, cluster), refuses=measured is not None)]


def _other_micro(config: RunConfig, cluster: Cluster) -> str:
    shared = config.parallel
    rows = config.batch.common_rows * shared.row_ranks
    groups = math.lcm(shared.row_ranks, shared.experts, config.engine.zero_hpz)
    if rows % cluster.size or cluster.size % groups:  # no micro-batch would
        return ""
    sizes = divisors(rows // cluster.size)
    return f", or batch.micro={max(size for size in sizes if size <= config.batch.micro)}"


def _nearest(config: RunConfig, task: TrainingTask, cluster: Cluster) -> str:
    candidates = search(config, task, cluster, count=1000)
    if not candidates:
        share = host_bytes(task, ParallelLayout(config.engine, 1, 1), cluster)
        return (
            f"use more or larger GPUs, or a smaller model: no layout fits {cluster.size} x {cluster.gpu.name}, "
            f"whose share of master weights and moments alone is {share / GIB:.1f} GiB a rank"
        )
    best = min(candidates, key=lambda one: (len(changes(one.layout, config)), one.rate.step_s))
    overrides = " ".join(changes(best.layout, config))
    return f"use {overrides} ({best.memory_bytes / GIB:.1f} GiB), or see --search"
