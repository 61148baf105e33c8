"""Choice of FP8 by the plan: the recipe that pays on a GPU, for a model and its layout.

    engine.fp8=auto  ->  each recipe that the config takes  ->  seconds of a step, in bf16 and by it
                     ->  the fastest from FP8_PAYS on, or `off`

Not here: the times of single products (`fp8.py`).
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from pydantic import ValidationError

from pretrain.config.run import RunConfig
from pretrain.errors import ConfigError
from pretrain.plan.cluster import Cluster
from pretrain.plan.fp8 import GEMM_SPEEDUP, refusal
from pretrain.plan.roofline import predict_rate
from pretrain.plan.task import ParallelLayout, TrainingTask

FP8_PAYS = 1.05
"""Predicted speed of a step over bf16 from which FP8 is worth its rounding."""


def step_speedup(
    task: TrainingTask, layout: ParallelLayout, cluster: Cluster, recipe: str
) -> float:  # fmt: skip
    """Returns the predicted speed of a step by a recipe over bf16."""
    engines = (layout.engine.model_copy(update={"fp8": fp8}) for fp8 in ("off", recipe))
    rates = [predict_rate(task, replace(layout, engine=engine), cluster) for engine in engines]
    return rates[0].step_s / rates[1].step_s


def choose_fp8(config: RunConfig, task: TrainingTask, cluster: Cluster | None) -> RunConfig:
    """Returns the config with the recipe that `engine.fp8=auto` is: `off` on an unknown cluster, None."""
    if config.engine.fp8 != "auto":
        return config
    speeds = {"off": FP8_PAYS}
    if cluster is not None:
        for layout in _layouts(config, cluster):
            speeds[layout.engine.fp8] = step_speedup(task, layout, cluster, layout.engine.fp8)
    best = max(speeds, key=lambda recipe: speeds[recipe])
    return config.model_copy(update={"engine": config.engine.model_copy(update={"fp8": best})})


def _layouts(config: RunConfig, cluster: Cluster) -> Iterator[ParallelLayout]:
    """Yields the layouts with the recipes that config and GPU take."""
    values = config.model_dump(mode="json", by_alias=True)
    for recipe in GEMM_SPEEDUP:
        # A model, rows or ranks that FP8 has no products for; a batch that these ranks cannot divide.
        with suppress(ValidationError, ConfigError):
            engine = values["engine"] | {"fp8": recipe}
            asked = RunConfig.model_validate(values | {"engine": engine})
            plan = asked.plan_ranks(cluster.size)
            layout = ParallelLayout(asked.engine, plan.micro, plan.accumulation).on(cluster.size)
            if not refusal(layout.engine, cluster):
                yield layout
