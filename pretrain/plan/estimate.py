"""A whole plan as plain values: the output of `--json`, and the input of the tables.

config, cluster -> model, batch -> memory of a rank -> rates -> network -> course of the run -> data
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from pretrain.config.run import RunConfig
from pretrain.plan import course
from pretrain.plan.cluster import Cluster
from pretrain.plan.course import StoredData
from pretrain.plan.fp8 import fp8_products, refusal, time_ratio
from pretrain.plan.fp8_choice import FP8_PAYS, choose_fp8, step_speedup
from pretrain.plan.memory import host_bytes, kept_bytes, largest_micro, memory_limit, rank_memory
from pretrain.plan.params import count_active, count_parts
from pretrain.plan.roofline import (
    Rate,
    exchange_seconds,
    link_seconds,
    plan_work,
    predict_rate,
    recompute_share,
    wire_bytes,
)
from pretrain.plan.search import LayoutCandidate, ScalingPoint, check_fits, search, sweep
from pretrain.plan.task import ParallelLayout, RunFlops, TrainingTask, known_model, task_of
from pretrain.plan.trained import train_new_tokens

DAY_S = 86_400
_MOST_ROWS = 1024
"""Largest micro-batch that is looked for."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of a plan besides config and cluster."""

    mfu: float | None = None  # assumed MFU, 0 to 1
    measured_tokens_s: float | None = None  # measured tokens a second of a run of the same config
    time_s: float | None = None  # time limit of a job
    disk_bytes_s: float = 2e9  # write speed of checkpoints, by all ranks together
    mtbf_node_days: float = course.MTBF_NODE_DAYS  # mean days between failures of a node
    search: bool = False  # true: look for layouts
    sweep: tuple[int, ...] = ()  # numbers of nodes to predict


def plan_facts(
    config: RunConfig, cluster: Cluster, options: PlanOptions, stored: StoredData | None = None
) -> dict[str, Any]:
    """Plans a run; `stored=None`: its data are not here, and an unknown vocabulary is assumed.

    Returns JSON values: bytes, seconds and counts. Where the batch does not divide over the ranks,
    values that depend on the layout are absent, and `problems` has the reason.
    """
    sizes = (stored.vocab_size, stored.labels) if stored else (None, ())
    if stored is not None and stored.vocab_size > (config.model.vocab_size or stored.vocab_size):
        finetune = train_new_tokens(config.model, config.finetune)
        config = config.model_copy(update={"finetune": finetune})
    task = task_of(config, known_model(config.model, *sizes))
    config = choose_fp8(config, task, cluster)
    problems = check_fits(config, cluster, task)
    facts: dict[str, Any] = {
        "cluster": {
            "nodes": cluster.nodes,
            "per_node": cluster.per_node,
            "ranks": cluster.size,
            **asdict(cluster.gpu),
        },
        "calibration": None if cluster.calibration is None else asdict(cluster.calibration),
        "model": _model_facts(config, task, stored),
        "problems": [asdict(problem) for problem in problems],
    }
    if not any(problem.kind == "batch" for problem in problems):
        facts |= _layout_facts(config, task, cluster, options, stored)
    if options.search:
        facts["search"] = list(map(_candidate_facts, search(config, task, cluster)))
    if options.sweep:
        points = sweep(config, task, cluster, options.sweep)
        facts["sweep"] = [_point_facts(point, config, task) for point in points]
    return facts


def _layout_facts(
    config: RunConfig, task: TrainingTask, cluster: Cluster, options: PlanOptions, stored: StoredData | None
) -> dict[str, Any]:
    batch = config.plan_ranks(cluster.size)
    layout = ParallelLayout(config.engine, batch.micro, batch.accumulation).on(cluster.size)
    rates = {"predicted": predict_rate(task, layout, cluster)}
    if options.mfu is not None:
        rates["assumed"] = predict_rate(task, layout, cluster, mfu=options.mfu)
    if options.measured_tokens_s is not None:
        rates["measured"] = predict_rate(task, layout, cluster, tokens_s=options.measured_tokens_s)
    # The surest rate, which is the last, is the base of all that follows.
    best = list(rates.values())[-1]
    return {
        "layout": {
            "engine": layout.engine.kind,
            "precision": config.engine.precision,
            **_engine_facts(layout),
            **asdict(replace(batch, steps=None)),  # which are those of `batch.schedule`
            "tokens_per_step": batch.rows * task.tokens,
        },
        "memory": _memory_facts(task, layout, cluster, batch.rows_per_rank),
        "rates": {name: _rate_facts(rate, config, task, cluster) for name, rate in rates.items()},
        "fp8": _fp8_facts(task, layout, cluster),
        "network": _network_facts(task, layout, cluster),
        **_exchange_facts(task, layout, cluster),
        "course": _course_facts(config, task, best, cluster, options),
        "data": _data_facts(config, sum(count_parts(task.model).values()), best.step_s, stored),
    }


def _model_facts(config: RunConfig, task: TrainingTask, stored: StoredData | None) -> dict[str, Any]:
    parts = count_parts(task.model)
    flops = task.flops
    in_blocks = flops.forward.projections + flops.forward.attention
    again = recompute_share(task, config.engine) * in_blocks
    return {
        "vocab_size": task.model.vocab_size,
        "vocab_assumed": task.model.vocab_size is not None and config.model.vocab_size is None and stored is None,
        "parameters": {**parts, "total": sum(parts.values())},
        "active": count_active(task.model),
        "adapters": task.trained.adapter_values if task.trained else 0,
        "trained": task.values.trained,
        "seq_len": task.lengths.target,
        "source_len": task.lengths.source,
        "flops": {
            "run": RunFlops(config, task).before(config.train.last_step),
            "whole": config.batch.steps.before(config.train.last_step) * flops.whole.total,
        },
        "flops_per_token": {
            "forward": flops.forward.total / task.tokens,
            "backward": (flops.whole.total - flops.forward.total) / task.tokens,
            "recompute": again / task.tokens,
            "useful": flops.whole.total / task.tokens,
        },
    }


def _engine_facts(layout: ParallelLayout) -> dict[str, Any]:
    names = ("zero_stage", "activation_checkpointing", "offload_optimizer", "offload_params", "offload_activations")
    return {name: getattr(layout.engine, name) for name in names}


def _candidate_facts(found: LayoutCandidate) -> dict[str, Any]:
    return {
        "overrides": found.layout.overrides(),
        "accumulation": found.layout.accumulation,
        "micro": found.layout.micro,
        **_engine_facts(found.layout),
        **_speed_facts(found.rate),
        "memory_bytes": found.memory_bytes,
    }


def _point_facts(point: ScalingPoint, config: RunConfig, task: TrainingTask) -> dict[str, Any]:
    facts = asdict(point)
    del facts["rate"]
    rate = point.rate
    if rate is None:
        return facts | dict.fromkeys(("mfu", "tokens_per_s", "bound", "days"))
    total_s = _course_s(config, task, rate, config.batch.common_rows)
    return facts | _speed_facts(rate) | {"days": total_s / DAY_S}


def _course_s(config: RunConfig, task: TrainingTask, rate: Rate, rows: int) -> float:
    """Returns the seconds of a run at the rate of steps of `rows` whole rows, in proportion to FLOPs."""
    flops = RunFlops(config, task).before(config.train.last_step)
    return rate.step_s * flops / (rows * task.flops.whole.total)


def _speed_facts(rate: Rate) -> dict[str, Any]:
    return {"mfu": rate.mfu, "tokens_per_s": rate.tokens_s, "bound": rate.bound}


def _memory_facts(task: TrainingTask, layout: ParallelLayout, cluster: Cluster, rows_per_rank: int) -> dict[str, Any]:
    memory = rank_memory(task, layout, cluster)
    most = max(_MOST_ROWS, rows_per_rank)
    return {
        **asdict(memory),
        "total": memory.total,
        "limit": memory_limit(cluster),
        "host": host_bytes(task, layout, cluster),
        "largest_micro": largest_micro(task, layout.engine, cluster, most),
        "micro_limit": most,
    }


def _rate_facts(rate: Rate, config: RunConfig, task: TrainingTask, cluster: Cluster) -> dict[str, Any]:
    total_s = _course_s(config, task, rate, config.batch.rows)
    return {
        **_speed_facts(rate),
        "step_s": rate.step_s,
        "parts_s": None if rate.parts is None else asdict(rate.parts),
        "days": total_s / DAY_S,
        "gpu_hours": total_s * cluster.size / 3600,
    }


def _fp8_facts(task: TrainingTask, layout: ParallelLayout, cluster: Cluster) -> dict[str, Any] | None:
    """Returns the products of the blocks in bf16 and FP8; None where it is not asked for and cannot be used."""
    engine, asked = layout.engine, layout.engine.has_fp8
    why = refusal(engine, cluster)
    recipe = engine.fp8 if asked else "tensorwise"
    products = fp8_products(task, layout.micro, recipe, cluster)
    if not products or (why and not asked):
        return None
    step = step_speedup(task, layout, cluster, recipe)
    return {
        "recipe": recipe,
        "asked": asked,
        "refused": why,
        "products": [{**asdict(product), "speedup": product.speedup} for product in products],
        "speedup": 1 / time_ratio(products),
        "step_speedup": step,
        "pays": not why and step >= FP8_PAYS,
    }


def _network_facts(task: TrainingTask, layout: ParallelLayout, cluster: Cluster) -> list[dict[str, Any]]:
    work = plan_work(task, layout, cluster.size, cluster.device)
    node = replace(cluster, nodes=1)
    rows = []
    for stage in range(4):
        sent = wire_bytes(replace(work, zero_stage=stage), cluster.size)
        total = sent.total(layout.accumulation)
        inside = link_seconds(total, node, cluster.constants)
        to_all = total - layout.accumulation * sent.inside
        between = link_seconds(to_all, cluster, cluster.constants) if cluster.nodes > 1 else 0.0
        rows.append({"zero_stage": stage, "bytes": total, "inside_s": inside, "between_s": between})
    return rows


def _exchange_facts(task: TrainingTask, layout: ParallelLayout, cluster: Cluster) -> dict[str, Any]:
    work = plan_work(task, layout, cluster.size, cluster.device)
    of_step = {
        "exchange": (task.sequence, layout.accumulation * work.exchanged),
        "experts": (task.experts, layout.accumulation * work.routed),
        "tensor": (task.tensor, layout.accumulation * work.collected),
    }
    facts = {}
    for name, (ranks, sent) in of_step.items():
        seconds = exchange_seconds(sent, ranks, cluster, cluster.constants)
        facts[name] = {"ranks": ranks, "bytes": sent, "seconds": seconds}
    return facts


def _course_facts(
    config: RunConfig, task: TrainingTask, rate: Rate, cluster: Cluster, options: PlanOptions
) -> dict[str, Any]:
    last = config.train.last_step
    step_s = rate.step_s
    size = 4 * task.values.saved + kept_bytes(task)
    num_kept = course.checkpoints_at_once(config.checkpoint, last)
    save_s = size / options.disk_bytes_s
    total_s = _course_s(config, task, rate, config.batch.rows)
    interval_s = config.checkpoint.every_steps * step_s
    mtbf_days = options.mtbf_node_days
    failures = course.plan_failures(cluster.nodes, mtbf_days, save_s, interval_s, total_s)
    facts: dict[str, Any] = {
        "steps": last,
        "total_s": total_s,
        "checkpoint_bytes": size,
        "checkpoints_kept": num_kept,
        "disk_bytes": num_kept * size,
        "save_s": save_s,
        "interval_s": interval_s,
        "failures": {
            **asdict(failures),
            "daly_steps": max(1, round(failures.daly_s / step_s)),
            "assumed": mtbf_days == course.MTBF_NODE_DAYS,
        },
    }
    if options.time_s is not None:
        jobs = course.plan_jobs(options.time_s, total_s, step_s, save_s)
        facts["jobs"] = {"limit_s": options.time_s, **asdict(jobs)}
    return facts


def _data_facts(config: RunConfig, parameters: int, step_s: float, stored: StoredData | None) -> dict[str, Any]:
    lanes = config.data.lanes
    supply = course.plan_supply(
        rows=config.batch.rows,
        row_tokens=config.lengths.row,
        total_rows=config.batch.steps.before(config.train.last_step),
        step_s=step_s,
        parameters=parameters,
        lanes=lanes,
        stored=stored,
    )
    facts = {**asdict(supply), "stored": None if stored is None else asdict(stored), "lanes": lanes}
    if config.objective.has_reference and supply.epochs:
        # The answers by the model that training begins with: a forward pass, once.
        num_rows = config.batch.steps.before(config.train.last_step) / supply.epochs
        facts["reference_s"] = num_rows / config.batch.rows * step_s / 3
    # That ratio is one of language models.
    return facts | ({} if config.model.input is None else {"optimal_tokens": None})
