"""Layouts and points of a curve as plain values."""

from typing import Any

from pretrain.config.run import RunConfig
from pretrain.plan.rate import DAY_S
from pretrain.plan.search import Found
from pretrain.plan.sweep import Point


def found_facts(found: Found) -> dict[str, Any]:
    """Returns a layout of `--search`."""
    return {
        "overrides": found.layout.overrides(),
        "accumulation": found.layout.accumulation,
        "micro": found.layout.micro,
        "zero_stage": found.layout.engine.zero_stage,
        "activation_checkpointing": found.layout.engine.activation_checkpointing,
        "offload_optimizer": found.layout.engine.offload_optimizer,
        "offload_params": found.layout.engine.offload_params,
        "mfu": found.rate.mfu,
        "tokens_per_s": found.rate.tokens_s,
        "bound": found.rate.bound,
        "memory_bytes": found.memory_bytes,
    }


def point_facts(point: Point, config: RunConfig) -> dict[str, Any]:
    """Returns a point of `--sweep`; without a rate, why there is none."""
    rate = point.rate
    return {
        "nodes": point.nodes,
        "ranks": point.ranks,
        "micro": point.micro,
        "accumulation": point.accumulation,
        "mfu": None if rate is None else rate.mfu,
        "tokens_per_s": None if rate is None else rate.tokens_s,
        "days": None if rate is None else rate.step_s * config.train.last_step / DAY_S,
        "bound": None if rate is None else rate.bound,
        "efficiency": point.efficiency,
        "why": point.why,
    }
