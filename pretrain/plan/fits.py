"""Whether a config can run on a cluster at all: what a launcher asks before it submits anything."""

from dataclasses import dataclass

from pretrain.config.data import plan_batch
from pretrain.config.run import RunConfig
from pretrain.errors import ConfigError
from pretrain.plan.cluster import Cluster
from pretrain.plan.layout import Layout, changes, task_of
from pretrain.plan.search import Found, divisors, search
from pretrain.plan.state import host_bytes, memory_limit, rank_memory
from pretrain.plan.work import Task

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


def check_fits(config: RunConfig, cluster: Cluster, task: Task | None = None) -> list[Problem]:
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
    layout = Layout(config.engine, plan.micro, plan.accumulation)
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


def _nearest(config: RunConfig, task: Task, cluster: Cluster) -> str:
    """Names the layout that fits and changes least: of those, the fastest."""
    found = search(task, config.engine, cluster, config.batch.rows, count=1000)
    if not found:
        share = host_bytes(task, Layout(config.engine, 1, 1), cluster)
        return (
            f"use more or larger GPUs, or a smaller model: no layout fits {cluster.size} x {cluster.gpu.name}, whose "
            f"share of master weights and moments alone is {share / GIB:.1f} GiB a rank"
        )

    def distance(one: Found) -> tuple[int, float]:
        return len(changes(one.layout, config)), one.rate.step_s

    best = min(found, key=distance)
    return f"use {' '.join(changes(best.layout, config))} ({best.memory_bytes / GIB:.1f} GiB), or see --search"
