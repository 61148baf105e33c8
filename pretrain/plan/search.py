"""The layouts that fit, fastest first."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pretrain.config.engine import EngineConfig
from pretrain.config.recurrent import RecurrentConfig
from pretrain.plan.cluster import Cluster
from pretrain.plan.layout import Layout
from pretrain.plan.rate import Rate, predict_rate
from pretrain.plan.state import largest_micro, memory_limit, rank_memory
from pretrain.plan.work import Task

_MODES = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Found:
    """A layout that fits.

    Attributes:
        layout: It.
        rate: Its predicted speed.
        memory_bytes: Of one rank.
    """

    layout: Layout
    rate: Rate
    memory_bytes: int


def divisors(number: int) -> list[int]:
    """Returns them, ascending."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})


def engines(engine: EngineConfig, task: Task) -> Iterator[EngineConfig]:
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


def search(task: Task, engine: EngineConfig, cluster: Cluster, rows: int, count: int = 5) -> list[Found]:
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
        most = largest_micro(task, Layout(variant, 1, 1), cluster, per_rank)
        for micro in [size for size in divisors(per_rank) if size <= most][-2:]:
            layout = Layout(variant, micro, per_rank // micro)
            needed = rank_memory(task, layout, cluster).total
            if needed <= limit:
                found.append(Found(layout, predict_rate(task, layout, cluster), needed))
    fastest = min((one.rate.step_s for one in found), default=1.0)
    return sorted(found, key=lambda one: (round(one.rate.step_s / fastest / 0.005), one.memory_bytes))[:count]
