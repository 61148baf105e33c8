"""`pretrain doctor --calibrate`: measured speeds as constants of `pretrain plan`.

kernels alone, on all ranks at once (kernel_speed.py)  shares of the peaks of `plan/gpus.py`
a few steps of the config, made small, on one rank     efficiency: what a step reaches of what its kernels would take
"""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from pretrain import dist
from pretrain.config.data import plan_batch
from pretrain.config.load import load_config
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.doctor.kernel_speed import KernelShape, measure
from pretrain.doctor.small import TrialOptions, small_overrides
from pretrain.doctor.spawn import run_command, run_ranks
from pretrain.errors import EXIT_OK, ConfigError
from pretrain.plan.cluster import Calibration, Cluster, find_gpu, fit_products
from pretrain.plan.gpus import GPUS, Gpu, name_of_device
from pretrain.plan.search import predict_rate
from pretrain.plan.work import ParallelLayout, task_of
from pretrain.run.folder import RunDir
from pretrain.utils.jsonl import read_rows

_STEPS = 12
_MEASURED_WITHIN_S = 600.0


def shape_of(config: RunConfig, device: str) -> KernelShape:
    """Returns the kernel shape of a config. Raises: ConfigError: recurrent models are not calibrated."""
    model = config.model
    if not isinstance(model, ModelConfig):
        raise ConfigError("model.kind=recurrent is not calibrated", fix="give a config with a Transformer")
    stack = model.last_stack
    length = config.lengths.target
    causal = model.decoder is not None
    return KernelShape(device, config.engine.precision, stack.heads, stack.per_head_width, length, causal)


def build_calibration(found: dict[str, Any], gpu_name: str | None) -> Calibration:
    """Converts measurements to shares of a GPU's data sheet; the efficiency is 1 until steps are timed.

    Args:
        found: Result of `measure`.
        gpu_name: Key of `GPUS`. None: by the name of the device.

    Raises:
        ConfigError: The device is not known here.
    """
    name = gpu_name or ("cpu" if found["shape"]["device"] == "cpu" else name_of_device(found["device"]))
    if name is None:
        raise ConfigError(
            f"{found['device']} is not in pretrain/plan/gpus.py",
            fix=f"say which of {', '.join(GPUS)} it is like: --gpu",
        )
    gpu = GPUS[name]
    peak = gpu.flops_fp32 if found["shape"]["precision"] == "fp32" else gpu.flops
    products, half_width = fit_products([(width, speed / peak) for width, speed in found["products"]])
    link, network = _shares_of_links(found, gpu)
    return Calibration(
        gpu=name,
        device=found["device"],
        host=found["host"],
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=found["versions"],
        products=products,
        half_width=half_width,
        attention=found["attention"] / peak,
        memory_share=found["memory"] / gpu.memory_bytes_s,
        link_share=link,
        network_share=network,
        efficiency=1.0,
        overhead_bytes=found["overhead_bytes"],
        group_bytes=found["group_bytes"],
        memory_bytes=found["memory_bytes"],
    )


def _shares_of_links(found: dict[str, Any], gpu: Gpu) -> tuple[float | None, float | None]:
    """Returns the shares of links and network, of which a sum over ranks tells one: the slower that it passes."""
    speed, hosts = found["all_reduce"], found["num_hosts"]
    if speed is None:
        return None, None
    if hosts == 1:
        return speed / gpu.link_bytes_s, None
    # As `link_seconds` reckons: the ranks of a node share its cards, and (hosts - 1) / hosts of the bytes pass them.
    ranks = found["num_ranks"]
    passed = speed * ranks / (ranks - 1) * (hosts - 1) / hosts
    return None, passed / (ranks // hosts * gpu.network_bytes_s)


def with_step(calibration: Calibration, predicted_s: float, measured_s: float) -> Calibration:
    """Returns the calibration with the efficiency of a step, at most 1: launches and small kernels take time too."""
    return replace(calibration, efficiency=min(1.0, predicted_s / measured_s))


def step_seconds(rows: list[dict[str, Any]]) -> float | None:
    """Returns the seconds of a step in the second half of a short run; None where there are too few rows.

    Args:
        rows: Rows of metrics.jsonl, one a step; `step_time_s` is the mean over all steps so far.
    """
    totals = [(row["step"], row["step"] * row["step_time_s"]) for row in rows if row.get("step_time_s")]
    if len(totals) < 4:
        return None
    (first, early), (last, late) = totals[len(totals) // 2 - 1], totals[-1]
    seconds = (late - early) / (last - first)
    return seconds if seconds > 0 and math.isfinite(seconds) else None


def describe(calibration: Calibration, found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Returns rows of a table: name, measured value, share of the peak."""
    gpu = GPUS[calibration.gpu]
    speed = found["products"][-1]
    rows = [
        (f"products, width {speed[0]}", f"{speed[1] / 1e12:.3g} TFLOP/s", f"{calibration.products:.3f} of wide ones"),
        ("half of it at width", f"{calibration.half_width:.0f}", ""),
        ("attention", f"{found['attention'] / 1e12:.3g} TFLOP/s", f"{calibration.attention:.3f}"),
        ("memory", f"{found['memory'] / 1e9:.3g} GB/s", f"{calibration.memory_share:.3f}"),
        ("overhead", f"{calibration.overhead_bytes / 2**20:.0f} MiB", ""),
        ("memory of it", f"{calibration.memory_bytes / 2**30:.1f} GiB", f"{gpu.memory_gib:.1f} by the data sheet"),
    ]
    if found["all_reduce"] is not None:
        share = calibration.link_share if calibration.link_share is not None else calibration.network_share
        rows.append(("all-reduce", f"{found['all_reduce'] / 1e9:.3g} GB/s a rank", f"{share:.3f}"))
    return [*rows, ("a step", "", f"{calibration.efficiency:.3f} of its kernels alone")]


def calibrate(
    asked: TrialOptions, gpu_name: str | None, tell: Callable[[str], None]
) -> tuple[Calibration, dict[str, Any]] | None:
    """Measures kernels on the ranks of this machine, or of a job, and times a step on one.

    Args:
        asked: Config, ranks, folder for the small run.
        gpu_name: Key of `GPUS`. None: by the name of the device.
        tell: Receives progress messages.

    Returns:
        The calibration, and what was measured; None on ranks of a job other than 0.

    Raises:
        ConfigError: The device or the name is not known, or the config has no attention.
        LaunchError: The ranks do not start.
    """
    if gpu_name is not None:
        find_gpu(gpu_name)
        gpu_name = gpu_name.lower()
    device = asked.cluster.device
    shape = shape_of(asked.loaded, device)
    tell(f"kernels, on {asked.cluster.size} rank{'s' if asked.cluster.size > 1 else ''}")
    if asked.place.is_started:
        found = measure(dist.read_world(), shape)
        if asked.place.rank:
            return None
    else:
        found = run_ranks(
            "pretrain.doctor.kernel_speed:measure_task", asked.cluster.size, asdict(shape), _MEASURED_WITHIN_S
        )
    calibration = build_calibration(found, gpu_name)
    tell(f"{_STEPS} steps of a small run of the config")
    timed = _time_step(asked, calibration)
    if timed is None:
        tell("they could not be timed: the efficiency of a step is taken as 1, and predictions will be too fast")
        return calibration, found
    return with_step(calibration, *timed), found


def _time_step(asked: TrialOptions, calibration: Calibration) -> tuple[float, float] | None:
    """Returns seconds of a step on one rank, predicted and measured; None where the run fails."""
    one = Cluster(1, 1, GPUS[calibration.gpu], calibration)
    small = small_overrides(asked.loaded, one, asked.folder, "steps", _STEPS, asked.loaded.engine.zero_stage)
    overrides = [*asked.overrides, *small]
    trial = run_command(["launch", "local", asked.config, *overrides], asked.folder / "steps.log")
    measured = step_seconds(read_rows(RunDir(asked.folder / "steps").metrics)) if trial.exit_code == EXIT_OK else None
    if measured is None:
        return None
    config = load_config(asked.config, overrides)
    batch = plan_batch(config.batch, 1)
    layout = ParallelLayout(config.engine, batch.micro, batch.accumulation)
    return predict_rate(task_of(config), layout, one).step_s, measured
