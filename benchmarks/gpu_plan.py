"""`pretrain plan` beside what the GPU campaign measures: memory and time of a step, before and after a calibration.

    beside_plan(...)     figures of a row: planned bytes and time, their errors, and `plan`, to plan it again
    read_rows(...)       rows of this campaign, and of earlier calls of it, that have `plan` and a time
    compare_plans(...)   their errors with the constants of `plan/gpus.py`, and with those of a calibration

Memory is compared without context and fragmentation, which the allocator does not see.
"""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu_bench import Bench
from benchmarks.gpu_peers import Work
from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.plan.cluster import Calibration, Cluster
from pretrain.plan.gpus import GPUS, Gpu
from pretrain.plan.memory import rank_memory
from pretrain.plan.roofline import predict_rate
from pretrain.plan.task import ParallelLayout

MEMORY_ERROR = 0.10
TIME_ERRORS = {"before": 0.25, "after": 0.10}
"""Largest errors of the plan that must hold."""


def plan_gpu(bench: Bench) -> Gpu | None:
    """Returns the GPU that is planned for; in the rehearsal a CPU. None: it is not in `plan/gpus.py`."""
    return GPUS["cpu"] if bench.rehearse else bench.gpu


def beside_plan(bench: Bench, work: Work, engine: EngineConfig, figures: dict[str, Any]) -> dict[str, Any]:
    """Returns measured and planned figures of a step; empty for an unknown GPU.

    `memory_error` and `time_error` are measured over planned, less 1. None: not measured.
    """
    gpu = plan_gpu(bench)
    if gpu is None:
        return {}
    cluster = Cluster(1, 1, gpu)
    layout = ParallelLayout(engine, work.micro, work.accumulation)
    memory = rank_memory(work.task, layout, cluster)
    planned, peak = memory.total - memory.overhead, figures.get("peak_allocated_bytes")
    found: dict[str, Any] = {"planned_bytes": memory.total, "planned_allocated_bytes": planned}
    found["memory_error"] = peak and round(peak / planned - 1, 4)
    found["memory_held"] = None if peak is None else abs(peak / planned - 1) <= MEMORY_ERROR
    if "ms" in figures:
        found["planned_ms"] = round(1e3 * predict_rate(work.task, layout, cluster).step_s, 4)
        found["time_error"] = round(figures["ms"]["median"] / found["planned_ms"] - 1, 4)
        found["plan"] = _describe(work, engine)
    return found


def _describe(work: Work, engine: EngineConfig) -> dict[str, Any]:
    names = ("seq_len", "micro", "accumulation", "source_len", "head_share", "precision", "lora_rank")
    described = {name: getattr(work, name) for name in names}
    sections = {"model": work.model, "engine": engine}
    return described | {name: section.model_dump(exclude_defaults=True) for name, section in sections.items()}


def _predict_ms(described: dict[str, Any], cluster: Cluster) -> float:
    values = dict(described)
    engine = EngineConfig.model_validate(values.pop("engine"))
    work = Work(**{**values, "model": ModelConfig.model_validate(values["model"])})
    return 1e3 * predict_rate(work.task, ParallelLayout(engine, work.micro, work.accumulation), cluster).step_s


def read_rows(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Returns the rows of these files that have a time and `plan`; a file that is not there has none."""
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    return [row for row in map(json.loads, lines) if "plan" in row and "ms" in row]


def compare_plans(rows: list[dict[str, Any]], calibration: Calibration) -> dict[str, Any]:
    """Returns each row's times and errors without and with a calibration, and what their largest and mean ones are.

    Args:
        rows: At least one, measured on the calibrated device.
        calibration: The measured constants.
    """
    gpu = GPUS[calibration.gpu]
    clusters = {"before": Cluster(1, 1, gpu), "after": Cluster(1, 1, gpu, calibration)}
    each: dict[str, dict[str, float]] = {}
    errors: dict[str, list[float]] = {name: [] for name in clusters}
    for row in rows:
        ms = row["ms"]["median"]
        planned = {name: _predict_ms(row["plan"], cluster) for name, cluster in clusters.items()}
        for name, predicted in planned.items():
            errors[name].append(abs(predicted / ms - 1))
        each[f"{row['arm']}: {row['case']}"] = {"measured_ms": ms} | {k: round(v, 3) for k, v in planned.items()}
    found = {
        name: {"mean": round(statistics.mean(one), 4), "largest": round(max(one), 4)} for name, one in errors.items()
    }
    held = {name: found[name]["largest"] <= bound for name, bound in TIME_ERRORS.items()}
    return {"value": {"rows": len(rows), **found}, "must": TIME_ERRORS, "held": held, "each": each}
