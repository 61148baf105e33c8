"""A whole plan as plain values: the output of `--json`, and the input of the tables.

config, cluster -> model, batch -> memory of a rank -> rates -> network -> course of the run -> data
"""

from dataclasses import asdict, dataclass
from typing import Any

from pretrain.config.data import BatchPlan, plan_batch
from pretrain.config.run import RunConfig
from pretrain.plan.cluster import Cluster
from pretrain.plan.course import MTBF_NODE_DAYS, StoredData, checkpoints_at_once, plan_failures, plan_jobs, plan_supply
from pretrain.plan.memory import state_bytes
from pretrain.plan.params import count_parts
from pretrain.plan.roofline import Network, link_seconds, wire_bytes
from pretrain.plan.search import (
    DAY_S,
    LayoutCandidate,
    Rate,
    ScalingPoint,
    check_fits,
    given_rate,
    predict_rate,
    search,
    sweep,
)
from pretrain.plan.state_memory import host_bytes, largest_micro, memory_limit, rank_memory
from pretrain.plan.trained import Values
from pretrain.plan.work import ParallelLayout, TrainingTask, known_model, plan_work, recompute_share, task_of

_MOST_ROWS = 1024
"""Largest micro-batch that is looked for."""

_ENGINE_FIELDS = ("zero_stage", "activation_checkpointing", "offload_optimizer", "offload_params")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of a plan besides config and cluster."""

    mfu: float | None = None  # assumed MFU, 0 to 1
    measured_tokens_s: float | None = None  # measured tokens a second of a run of the same config
    time_s: float | None = None  # time limit of a job
    disk_bytes_s: float = 2e9  # write speed of all ranks together, onto the file system of checkpoints
    mtbf_node_days: float = MTBF_NODE_DAYS  # mean days between failures of a node
    search: bool = False  # true: look for layouts
    sweep: tuple[int, ...] = ()  # numbers of nodes to predict


def plan_facts(
    config: RunConfig, cluster: Cluster, options: PlanOptions, stored: StoredData | None = None
) -> dict[str, Any]:
    """Plans a run.

    Args:
        config: Config of the run.
        cluster: Machines.
        options: Further questions.
        stored: Data of the run. None: they are not here, and an unknown vocabulary is assumed.

    Returns:
        JSON values: bytes, seconds and counts. Where the batch does not divide over the ranks, values that depend on
        the layout are absent, and `problems` says why.
    """
    model = known_model(config.model, stored.vocab_size if stored else None, stored.labels if stored else ())
    task = task_of(config, model)
    problems = check_fits(config, cluster, task)
    facts: dict[str, Any] = {
        "cluster": {"nodes": cluster.nodes, "per_node": cluster.per_node, "ranks": cluster.size, **asdict(cluster.gpu)},
        "calibration": None if cluster.calibration is None else asdict(cluster.calibration),
        "model": _model_facts(config, task, stored),
        "problems": [asdict(problem) for problem in problems],
    }
    if not any(problem.kind == "batch" for problem in problems):
        batch = plan_batch(config.batch, cluster.size)
        layout = ParallelLayout(config.engine, batch.micro, batch.accumulation)
        facts["layout"] = _layout_facts(config, task, batch, cluster)
        facts["memory"] = _memory_facts(task, layout, cluster, batch.rows_per_rank)
        rates = _rates(task, layout, cluster, options)
        facts["rates"] = {name: _rate_facts(rate, config, cluster) for name, rate in rates.items()}
        facts["network"] = _network_facts(task, layout, cluster)
        # The surest rate is the base of all that follows.
        best = list(rates.values())[-1]
        facts["course"] = _course_facts(config, task.values, best, cluster, options)
        facts["data"] = _data_facts(config, facts["model"]["parameters"]["total"], best, stored)
    if options.search:
        found = search(task, config.engine, cluster, config.batch.rows)
        facts["search"] = [_candidate_facts(one) for one in found]
    if options.sweep:
        facts["sweep"] = [_point_facts(point, config) for point in sweep(config, task, cluster, list(options.sweep))]
    return facts


def _model_facts(config: RunConfig, task: TrainingTask, stored: StoredData | None) -> dict[str, Any]:
    parts, flops = count_parts(task.model), task.flops
    again = recompute_share(task.model, config.engine) * (flops.forward.projections + flops.forward.attention)
    return {
        "vocab_size": task.model.vocab_size,
        "vocab_assumed": config.model.vocab_size is None and stored is None,
        "parameters": {**asdict(parts), "total": parts.total},
        "adapters": task.trained.adapter_values if task.trained else 0,
        "trained": task.values.trained,
        "seq_len": task.lengths.target,
        "source_len": task.lengths.source,
        "flops_per_token": {
            "forward": flops.forward.total / task.tokens,
            "backward": (flops.whole.total - flops.forward.total) / task.tokens,
            "recompute": again / task.tokens,
            "useful": flops.whole.total / task.tokens,
        },
    }


def _layout_facts(config: RunConfig, task: TrainingTask, batch: BatchPlan, cluster: Cluster) -> dict[str, Any]:
    engine = config.engine
    return {
        "engine": engine.kind,
        "zero_stage": engine.zero_stage,
        "precision": engine.precision,
        **{name: getattr(engine, name) for name in _ENGINE_FIELDS[1:]},
        "rows": batch.rows,
        "rows_per_rank": batch.rows_per_rank,
        "micro": batch.micro,
        "accumulation": batch.accumulation,
        "tokens_per_step": batch.rows * task.tokens,
    }


def _candidate_facts(found: LayoutCandidate) -> dict[str, Any]:
    layout, rate = found.layout, found.rate
    return {
        "overrides": layout.overrides(),
        "accumulation": layout.accumulation,
        "micro": layout.micro,
        **{name: getattr(layout.engine, name) for name in _ENGINE_FIELDS},
        "mfu": rate.mfu,
        "tokens_per_s": rate.tokens_s,
        "bound": rate.bound,
        "memory_bytes": found.memory_bytes,
    }


def _point_facts(point: ScalingPoint, config: RunConfig) -> dict[str, Any]:
    facts, rate = asdict(point), point.rate
    del facts["rate"]
    return {
        **{name: facts.pop(name) for name in ("nodes", "ranks", "micro", "accumulation")},
        "mfu": None if rate is None else rate.mfu,
        "tokens_per_s": None if rate is None else rate.tokens_s,
        "days": None if rate is None else rate.step_s * config.train.last_step / DAY_S,
        "bound": None if rate is None else rate.bound,
        **facts,
    }


def _memory_facts(task: TrainingTask, layout: ParallelLayout, cluster: Cluster, rows_per_rank: int) -> dict[str, Any]:
    found = rank_memory(task, layout, cluster)
    most = max(_MOST_ROWS, rows_per_rank)
    return {
        **asdict(found),
        "total": found.total,
        "limit": memory_limit(cluster),
        "host": host_bytes(task, layout, cluster),
        "largest_micro": largest_micro(task, layout, cluster, most),
        "micro_limit": most,
    }


def _rates(task: TrainingTask, layout: ParallelLayout, cluster: Cluster, options: PlanOptions) -> dict[str, Rate]:
    """Returns the known rates, the surest last."""
    rates = {"predicted": predict_rate(task, layout, cluster)}
    if options.mfu is not None:
        rates["assumed"] = given_rate(task, layout, cluster, mfu=options.mfu)
    if options.measured_tokens_s is not None:
        rates["measured"] = given_rate(task, layout, cluster, tokens_s=options.measured_tokens_s)
    return rates


def _rate_facts(rate: Rate, config: RunConfig, cluster: Cluster) -> dict[str, Any]:
    total_s = rate.step_s * config.train.last_step
    return {
        "mfu": rate.mfu,
        "tokens_per_s": rate.tokens_s,
        "step_s": rate.step_s,
        "bound": rate.bound,
        "parts_s": None if rate.parts is None else asdict(rate.parts),
        "days": total_s / DAY_S,
        "gpu_hours": total_s * cluster.size / 3600,
    }


def _network_facts(task: TrainingTask, layout: ParallelLayout, cluster: Cluster) -> list[dict[str, Any]]:
    """Returns bytes and seconds of a rank's communication in a step at each ZeRO stage, without overlap."""
    work = plan_work(task, layout.engine, cluster.size, layout.micro, layout.accumulation)
    found = []
    for stage in range(4):
        network = Network(cluster.nodes, cluster.per_node, stage, overlaps=False)
        often, once = wire_bytes(work, network)
        total = layout.accumulation * often + once
        alone = Network(1, cluster.per_node, stage, overlaps=False)
        found.append(
            {
                "zero_stage": stage,
                "bytes": total,
                "inside_s": link_seconds(total, alone, cluster.gpu, cluster.constants),
                "between_s": link_seconds(total, network, cluster.gpu, cluster.constants) if cluster.nodes > 1 else 0.0,
            }
        )
    return found


def _course_facts(
    config: RunConfig, values: Values, rate: Rate, cluster: Cluster, options: PlanOptions
) -> dict[str, Any]:
    last = config.train.last_step
    size = 4 * values.saved + state_bytes(config.optim.kind, values)
    kept = checkpoints_at_once(config.checkpoint, last)
    save_s, total_s = size / options.disk_bytes_s, rate.step_s * last
    interval_s = config.checkpoint.every_steps * rate.step_s
    failures = plan_failures(cluster.nodes, options.mtbf_node_days, save_s, interval_s, total_s)
    facts: dict[str, Any] = {
        "steps": last,
        "total_s": total_s,
        "checkpoint_bytes": size,
        "checkpoints_kept": kept,
        "disk_bytes": kept * size,
        "save_s": save_s,
        "interval_s": interval_s,
        "failures": {**asdict(failures), "daly_steps": max(1, round(failures.daly_s / rate.step_s))},
    }
    if options.time_s is not None:
        facts["jobs"] = {"limit_s": options.time_s, **asdict(plan_jobs(options.time_s, total_s, rate.step_s, save_s))}
    return facts


def _data_facts(config: RunConfig, parameters: int, rate: Rate, stored: StoredData | None) -> dict[str, Any]:
    supply = plan_supply(
        config.batch.rows,
        config.lengths.row,
        config.train.last_step,
        rate.step_s,
        parameters,
        config.data.lanes,
        stored,
    )
    return {**asdict(supply), "stored": None if stored is None else asdict(stored), "lanes": config.data.lanes}
