"""Speed of a layout, the search for layouts that fit, the scaling curve, and the check before a job is submitted."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pretrain.config.data import plan_batch
from pretrain.config.engine import EngineConfig
from pretrain.config.recurrent import RecurrentConfig
from pretrain.config.run import RunConfig
from pretrain.errors import ConfigError
from pretrain.plan.cluster import Cluster
from pretrain.plan.roofline import StepTime, time_step
from pretrain.plan.state_memory import host_bytes, largest_micro, memory_limit, rank_memory
from pretrain.plan.work import ParallelLayout, TrainingTask, changes, plan_work, task_of

DAY_S = 86_400
GIB = 2**30

LOADER_TOKENS_S = 8e7
"""Tokens that a rank's loader assembles a second with one thread, documents masked (benchmarks/results.md)."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Speed of a run."""

    step_s: float  # seconds of a step
    tokens_s: float  # tokens that the model reads a second, over all ranks
    mfu: float  # model FLOPs utilization, 0 to 1
    bound: str  # bottleneck: compute, memory, network, offload or data; `given`: not predicted
    parts: StepTime | None = None  # seconds of a step by part; None for a rate that was not predicted


def predict_rate(task: TrainingTask, layout: ParallelLayout, cluster: Cluster) -> Rate:
    """Predicts the speed of a layout by the roofline."""
    engine = layout.engine
    work = plan_work(task, engine, cluster.size, layout.micro, layout.accumulation)
    found = time_step(work, cluster.network(engine.kind, engine.zero_stage), cluster.gpu, cluster.constants)
    tokens = cluster.size * layout.micro * layout.accumulation * task.tokens
    # Batches are assembled while a step runs: they cost nothing until they take longer than it.
    reading_s = tokens / cluster.size / LOADER_TOKENS_S
    step_s = max(found.total, reading_s)
    mfu = work.model_flops * cluster.size / step_s / (cluster.size * cluster.gpu.flops)
    return Rate(step_s, tokens / step_s, mfu, "data" if reading_s > found.total else found.bound, found)


def given_rate(
    task: TrainingTask, layout: ParallelLayout, cluster: Cluster, *, mfu: float = 0.0, tokens_s: float = 0.0
) -> Rate:
    """Returns the speed at an assumed MFU, or at a measured number of tokens a second."""
    work = plan_work(task, layout.engine, cluster.size, layout.micro, layout.accumulation)
    tokens = cluster.size * layout.micro * layout.accumulation * task.tokens
    # MFU is a share of the dense bf16 peak, also in fp32, as `tracking` counts it.
    peak = cluster.size * cluster.gpu.flops
    step_s = tokens / tokens_s if tokens_s else work.model_flops * cluster.size / (mfu * peak)
    return Rate(step_s, tokens / step_s, mfu or work.model_flops * cluster.size / step_s / peak, "given")


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


def engines(engine: EngineConfig, task: TrainingTask) -> Iterator[EngineConfig]:
    """Yields the variants of an engine of the same kind: stages, checkpointing, offload."""
    stages = (0, 1, 2, 3) if engine.kind == "deepspeed" else (0,)
    modes = ("none",) if isinstance(task.model, RecurrentConfig) else ("none", "selective", "full")
    for stage in stages:
        places: list[tuple[str, str]] = [("none", "none")]
        # Optimizers over whole matrices are refused on the host (`config/run.py`).
        if stage and task.optimizer == "adamw":
            places += [("cpu", "none"), *([("cpu", "cpu")] if stage == 3 else [])]
        for optimizer, params in places:
            if engine.precision == "fp16" and not stage:
                continue
            for mode in modes:
                update = {
                    "zero_stage": stage,
                    "activation_checkpointing": mode,
                    "activation_checkpointing_every": 1,
                    "offload_optimizer": optimizer,
                    "offload_params": params,
                }
                yield engine.model_copy(update=update)


def search(
    task: TrainingTask, engine: EngineConfig, cluster: Cluster, rows: int, count: int = 5
) -> list[LayoutCandidate]:
    """Returns the best `count` layouts of a global batch of `rows` rows, fastest first; empty where none fits.

    For each variant of the engine the two largest micro-batches that fit are tried: a smaller one is never faster. Of
    layouts equally fast to within half a per cent, the one that takes less memory comes first.
    """
    if rows % cluster.size:
        return []
    per_rank, limit = rows // cluster.size, memory_limit(cluster)
    found = []
    for variant in engines(engine, task):
        most = largest_micro(task, ParallelLayout(variant, 1, 1), cluster, per_rank)
        for micro in [size for size in divisors(per_rank) if size <= most][-2:]:
            layout = ParallelLayout(variant, micro, per_rank // micro)
            needed = rank_memory(task, layout, cluster).total
            if needed <= limit:
                found.append(LayoutCandidate(layout, predict_rate(task, layout, cluster), needed))
    fastest = min((one.rate.step_s for one in found), default=1.0)
    return sorted(found, key=lambda one: (round(one.rate.step_s / fastest / 0.005), one.memory_bytes))[:count]


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """One cluster size of the scaling curve."""

    nodes: int  # number of nodes
    ranks: int  # number of ranks
    micro: int  # rows of a micro-batch: the most that fits and divides, at most the config's
    accumulation: int  # micro-batches of a step
    rate: Rate | None  # predicted speed; None where nothing fits, or the batch does not divide
    efficiency: float  # tokens a second and rank, over those of the first point
    why: str = ""  # reason for a missing rate


def parse_sweep(text: str) -> list[int]:
    """Returns the numbers of nodes of `nodes=1..512`: powers of two from the first to the last.

    Raises:
        ConfigError: It is not of that form.
    """
    name, _, span = text.partition("=")
    first, dots, last = span.partition("..")
    if name != "nodes" or not dots or not first.isdecimal() or not last.isdecimal() or not 0 < int(first) <= int(last):
        raise ConfigError(f"{text!r} is no sweep", where="--sweep", fix="write --sweep nodes=1..512")
    nodes, found = int(first), []
    while nodes <= int(last):
        found.append(nodes)
        nodes *= 2
    return found


def sweep(config: RunConfig, task: TrainingTask, cluster: Cluster, nodes: list[int]) -> list[ScalingPoint]:
    """Predicts the same global batch on each number of nodes, at the config's ZeRO stage."""
    points: list[ScalingPoint] = []
    for count in nodes:
        there = replace(cluster, nodes=count)
        point = _point(config, task, there)
        first = next((p for p in points if p.rate is not None), None)
        if point.rate is not None and first is not None and first.rate is not None:
            each = point.rate.tokens_s / point.ranks
            point = replace(point, efficiency=each / (first.rate.tokens_s / first.ranks))
        points.append(point)
    return points


def _point(config: RunConfig, task: TrainingTask, cluster: Cluster) -> ScalingPoint:
    rows, size = config.batch.rows, cluster.size
    if rows % size:
        return ScalingPoint(cluster.nodes, size, 0, 0, None, 0.0, f"{rows} rows a step do not divide over {size} ranks")
    most = largest_micro(task, ParallelLayout(config.engine, 1, 1), cluster, min(config.batch.micro, rows // size))
    if not most:
        return ScalingPoint(cluster.nodes, size, 0, 0, None, 0.0, "not one row fits")
    micro = max(count for count in divisors(rows // size) if count <= most)
    layout = ParallelLayout(config.engine, micro, rows // size // micro)
    return ScalingPoint(cluster.nodes, size, micro, layout.accumulation, predict_rate(task, layout, cluster), 1.0)


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that would end a job in its first minute.

    Attributes:
        kind: `batch`: it does not divide over the ranks. `memory`: it is predicted not to fit.
        what: Problem, with its number.
        fix: Nearest layout that fits.
        refuses: True: a launcher refuses the job unless forced (a batch always, memory where the plan was calibrated
            on such a GPU). False: it warns.
    """

    kind: str
    what: str
    fix: str
    refuses: bool = True

    def error(self) -> ConfigError:
        """Returns it as an error for the user."""
        return ConfigError(self.what, fix=self.fix)


def check_fits(config: RunConfig, cluster: Cluster, task: TrainingTask | None = None) -> list[Problem]:
    """Returns the problems of a config on a cluster. Pure; `task=None` assumes what the data would say of the model."""
    task = task or task_of(config)
    if config.engine.kind == "single" and cluster.size > 1:
        return [Problem("batch", f"engine.kind=single is one process, not {cluster.size}", "use engine.kind=deepspeed")]
    try:
        plan = plan_batch(config.batch, cluster.size)
    except ConfigError as error:
        return [Problem("batch", error.what, f"{error.fix}{_other_micro(config, cluster)}")]
    layout = ParallelLayout(config.engine, plan.micro, plan.accumulation)
    needed, limit = rank_memory(task, layout, cluster).total, memory_limit(cluster)
    if needed <= limit:
        return []
    what = (
        f"a rank needs {needed / GIB:.1f} GiB, of the {limit / GIB:.1f} GiB of {_device(cluster)}, with "
        f"batch.micro={plan.micro} at ZeRO stage {config.engine.zero_stage} on {cluster.size} "
        f"rank{'s' if cluster.size > 1 else ''}"
    )
    return [Problem("memory", what, _nearest(config, task, cluster), refuses=cluster.calibration is not None)]


def _device(cluster: Cluster) -> str:
    return cluster.gpu.name if cluster.calibration is None else f"{cluster.calibration.device}, as measured"


def _other_micro(config: RunConfig, cluster: Cluster) -> str:
    """Names the largest smaller micro-batch that divides."""
    if config.batch.rows % cluster.size:
        return ""
    sizes = [str(size) for size in divisors(config.batch.rows // cluster.size) if size <= config.batch.micro]
    return f", or batch.micro={sizes[-1]}"


def _nearest(config: RunConfig, task: TrainingTask, cluster: Cluster) -> str:
    """Names the layout that fits with the fewest changes: of those, the fastest."""
    found = search(task, config.engine, cluster, config.batch.rows, count=1000)
    if not found:
        share = host_bytes(task, ParallelLayout(config.engine, 1, 1), cluster)
        return (
            f"use more or larger GPUs, or a smaller model: no layout fits {cluster.size} x {cluster.gpu.name}, whose "
            f"share of master weights and moments alone is {share / GIB:.1f} GiB a rank"
        )

    def distance(one: LayoutCandidate) -> tuple[int, float]:
        return len(changes(one.layout, config)), one.rate.step_s

    best = min(found, key=distance)
    return f"use {' '.join(changes(best.layout, config))} ({best.memory_bytes / GIB:.1f} GiB), or see --search"
