"""How fast a layout is, and how long a run takes at that rate."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pretrain.config.data import plan_batch
from pretrain.config.engine import EngineConfig
from pretrain.config.recurrent import RecurrentConfig
from pretrain.config.run import RunConfig
from pretrain.errors import ConfigError
from pretrain.plan.cluster import Cluster
from pretrain.plan.layout import ParallelLayout, changes, task_of
from pretrain.plan.roofline import StepTime, time_step
from pretrain.plan.state_memory import host_bytes, largest_micro, memory_limit, rank_memory
from pretrain.plan.work import TrainingTask, plan_work

DAY_S = 86_400

LOADER_TOKENS_S = 8e7

"""Tokens that a rank's loader assembles a second with one thread, documents masked (benchmarks/results.md)."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Speed of a run.

    Attributes:
        step_s: Seconds of a step.
        tokens_s: Tokens that the model reads a second, over all ranks.
        mfu: 0 to 1.
        bound: What limits it: compute, memory, network, offload, data; `given` where the MFU was.
        parts: Seconds of a step by part; None where the MFU was given.
    """

    step_s: float
    tokens_s: float
    mfu: float
    bound: str
    parts: StepTime | None = None


def peak_flops(layout: ParallelLayout, cluster: Cluster) -> float:
    """Returns the dense peak of all ranks that MFU is a share of: bf16's, also for fp32, as `tracking` counts it."""
    return cluster.size * cluster.gpu.flops


def predict_rate(task: TrainingTask, layout: ParallelLayout, cluster: Cluster) -> Rate:
    """Predicts the speed of a layout by the roofline."""
    engine = layout.engine
    work = plan_work(task, engine, cluster.size, layout.micro, layout.accumulation)
    found = time_step(work, cluster.network(engine.kind, engine.zero_stage), cluster.gpu, cluster.constants)
    tokens = cluster.size * layout.micro * layout.accumulation * task.tokens
    # Batches are assembled beside the step: they cost nothing until they take longer than it.
    reading_s = tokens / cluster.size / LOADER_TOKENS_S
    step_s = max(found.total, reading_s)
    mfu = work.model_flops * cluster.size / step_s / peak_flops(layout, cluster)
    return Rate(step_s, tokens / step_s, mfu, "data" if reading_s > found.total else found.bound, found)


def rate_at(mfu: float, task: TrainingTask, layout: ParallelLayout, cluster: Cluster) -> Rate:
    """Returns the speed at a given MFU: assumed, or measured."""
    work = plan_work(task, layout.engine, cluster.size, layout.micro, layout.accumulation)
    step_s = work.model_flops * cluster.size / (mfu * peak_flops(layout, cluster))
    tokens = cluster.size * layout.micro * layout.accumulation * task.tokens
    return Rate(step_s, tokens / step_s, mfu, "given")


def rate_of(tokens_s: float, task: TrainingTask, layout: ParallelLayout, cluster: Cluster) -> Rate:
    """Returns the speed at a given number of tokens a second, as a run has measured it."""
    tokens = cluster.size * layout.micro * layout.accumulation * task.tokens
    work = plan_work(task, layout.engine, cluster.size, layout.micro, layout.accumulation)
    step_s = tokens / tokens_s
    return Rate(step_s, tokens_s, work.model_flops * cluster.size / step_s / peak_flops(layout, cluster), "given")


# The layouts that fit, fastest first.


_MODES = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class LayoutCandidate:
    """A layout that fits.

    Attributes:
        layout: It.
        rate: Its predicted speed.
        memory_bytes: Of one rank.
    """

    layout: ParallelLayout
    rate: Rate
    memory_bytes: int


def divisors(number: int) -> list[int]:
    """Returns them, ascending."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})


def engines(engine: EngineConfig, task: TrainingTask) -> Iterator[EngineConfig]:
    """Yields the variants of an engine: stages, checkpointing, offload; those of its kind only."""
    stages = (0, 1, 2, 3) if engine.kind == "deepspeed" else (0,)
    modes = ("none",) if isinstance(task.model, RecurrentConfig) else _MODES
    for stage in stages:
        places: list[tuple[str, str]] = [("none", "none")]
        # Optimizers over whole matrices are refused on the host (config/training_rules.py).
        if stage and task.optimizer == "adamw":
            places += [("cpu", "none"), *([("cpu", "cpu")] if stage == 3 else [])]
        for optimizer, params in places:
            if engine.precision == "fp16" and not stage:
                continue
            for mode in modes:
                update: dict[str, Any] = {"zero_stage": stage, "activation_checkpointing": mode}
                update |= {
                    "activation_checkpointing_every": 1,
                    "offload_optimizer": optimizer,
                    "offload_params": params,
                }
                yield engine.model_copy(update=update)


def search(
    task: TrainingTask, engine: EngineConfig, cluster: Cluster, rows: int, count: int = 5
) -> list[LayoutCandidate]:
    """Returns the best layouts of a global batch, fastest first; empty where none fits.

    Of each variant of the engine the largest micro-batches that fit are tried: a smaller one is never faster. Of
    layouts that are equally fast to within half a per cent, the one that takes less memory comes first.

    Args:
        task: What is trained.
        engine: Its kind, precision and attention stay.
        cluster: Where.
        rows: Of the global batch.
        count: How many to return.
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


# Whether a config can run on a cluster at all: what a launcher asks before it submits anything.


GIB = 2**30


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that would end a job in its first minute.

    Attributes:
        kind: `batch`: it cannot be cut over the ranks, which is certain. `memory`: it is predicted not to fit.
        what: What is wrong, with the number.
        fix: The nearest layout that fits.
        refuses: A launcher should refuse it, unless it is forced: a batch always, memory where the plan was calibrated
            on such a GPU. Else it should warn.
    """

    kind: str
    what: str
    fix: str
    refuses: bool = True

    def error(self) -> ConfigError:
        """Returns it as an error for the user."""
        return ConfigError(self.what, fix=self.fix)


def check_fits(config: RunConfig, cluster: Cluster, task: TrainingTask | None = None) -> list[Problem]:
    """Returns what is wrong with running a config on a cluster; empty where nothing is. Pure.

    Args:
        config: The run.
        cluster: Where.
        task: The run's, with what its data say of the model. None: that is assumed.
    """
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
    """Names the micro-batches that this global batch and as many ranks allow."""
    if config.batch.rows % cluster.size:
        return ""
    sizes = [str(size) for size in divisors(config.batch.rows // cluster.size) if size <= config.batch.micro]
    return f", or batch.micro={sizes[-1]}"


def _nearest(config: RunConfig, task: TrainingTask, cluster: Cluster) -> str:
    """Names the layout that fits and changes least: of those, the fastest."""
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
