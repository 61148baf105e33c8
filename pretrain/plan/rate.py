"""How fast a layout is, and how long a run takes at that rate."""

from dataclasses import dataclass

from pretrain.plan.cluster import Cluster
from pretrain.plan.layout import Layout
from pretrain.plan.roofline import StepTime, time_step
from pretrain.plan.work import Task, plan_work

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


def peak_flops(layout: Layout, cluster: Cluster) -> float:
    """Returns the dense peak of all ranks that MFU is a share of: bf16's, also for fp32, as `tracking` counts it."""
    return cluster.size * cluster.gpu.flops


def predict_rate(task: Task, layout: Layout, cluster: Cluster) -> Rate:
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


def rate_at(mfu: float, task: Task, layout: Layout, cluster: Cluster) -> Rate:
    """Returns the speed at a given MFU: assumed, or measured."""
    work = plan_work(task, layout.engine, cluster.size, layout.micro, layout.accumulation)
    step_s = work.model_flops * cluster.size / (mfu * peak_flops(layout, cluster))
    tokens = cluster.size * layout.micro * layout.accumulation * task.tokens
    return Rate(step_s, tokens / step_s, mfu, "given")


def rate_of(tokens_s: float, task: Task, layout: Layout, cluster: Cluster) -> Rate:
    """Returns the speed at a given number of tokens a second, as a run has measured it."""
    tokens = cluster.size * layout.micro * layout.accumulation * task.tokens
    work = plan_work(task, layout.engine, cluster.size, layout.micro, layout.accumulation)
    step_s = tokens / tokens_s
    return Rate(step_s, tokens_s, work.model_flops * cluster.size / step_s / peak_flops(layout, cluster), "given")
