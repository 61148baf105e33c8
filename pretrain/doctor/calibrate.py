"""`pretrain doctor --calibrate`: measured speeds as constants of `pretrain plan`.

kernels alone, on all ranks at once           shares of the peaks of `plan/gpus.py`
a few steps of a small config, on one rank    efficiency: time of kernels alone over that of a step
"""

import math
import platform
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pretrain import dist
from pretrain.config.load import load_config
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.dist import World
from pretrain.doctor.machine import read_memory
from pretrain.doctor.rank_checks import all_reduce_speed, build_versions, import_torch, start_group, take_device
from pretrain.doctor.small import TrialOptions, small_overrides
from pretrain.doctor.spawn import run_command, run_ranks
from pretrain.errors import EXIT_OK, ConfigError
from pretrain.plan.cluster import Calibration, Cluster, fit_products
from pretrain.plan.gpus import GPUS, Gpu, find_gpu, name_of_device
from pretrain.plan.roofline import predict_rate
from pretrain.plan.task import ParallelLayout, task_of
from pretrain.run.folder import RunDir
from pretrain.utils.jsonl import read_rows
from pretrain.utils.units import plural

_STEPS = 12
_AS_MEASURED = ("device", "host", "versions", "overhead_bytes", "group_bytes", "memory_bytes")


@dataclass(frozen=True, slots=True)
class KernelShape:
    """The part of a config that determines the speed of its kernels."""

    device: str  # `cuda` or `cpu`
    precision: str
    heads: int
    head_width: int
    seq_len: int
    causal: bool


def shape_of(config: RunConfig, device: str) -> KernelShape:
    """Returns the kernel shape of a config. Raises: ConfigError for recurrent models."""
    model = config.model
    if not isinstance(model, ModelConfig):
        raise ConfigError(
            "model.kind=recurrent is not calibrated",
            fix="give a config with a Transformer",
        )
    stack = model.last_stack
    causal = model.decoder is not None
    length = config.lengths.target
    return KernelShape(device, config.engine.precision, stack.heads, stack.per_head_width, length, causal)


def build_calibration(found: dict[str, Any], gpu_name: str | None) -> Calibration:
    """Converts the result of `measure` to shares of a data sheet. Raises: ConfigError."""
    is_cpu = found["shape"]["device"] == "cpu"
    name = gpu_name or ("cpu" if is_cpu else name_of_device(found["device"]))
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
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
        products=products,
        half_width=half_width,
        attention=found["attention"] / peak,
        memory_share=found["memory"] / gpu.memory_bytes_s,
        link_share=link,
        network_share=network,
        efficiency=1.0,  # until steps are timed
        **{name: found[name] for name in _AS_MEASURED},
    )


def _shares_of_links(found: dict[str, Any], gpu: Gpu) -> tuple[float | None, float | None]:
    """Returns the shares of links and network; an all-reduce measures the slower one."""
    speed = found["all_reduce"]
    hosts = found["num_hosts"]
    if speed is None:
        return None, None
    if hosts == 1:
        return speed / gpu.link_bytes_s, None
    # As `link_seconds`: (hosts - 1) / hosts of the bytes pass the cards that a node's ranks share.
    ranks = found["num_ranks"]
    passed = speed * ranks / (ranks - 1) * (hosts - 1) / hosts
    return None, passed / (ranks // hosts * gpu.network_bytes_s)


def with_step(calibration: Calibration, predicted_s: float, measured_s: float) -> Calibration:
    """Returns the calibration with the efficiency of a step, at most 1."""
    return replace(calibration, efficiency=min(1.0, predicted_s / measured_s))


def step_seconds(rows: list[dict[str, Any]]) -> float | None:
    """Returns the seconds of a step in the second half of a short run; None with too few rows."""
    # `step_time_s` is the mean over all steps so far.
    totals = [(row["step"], row["step"] * row["step_time_s"]) for row in rows if row.get("step_time_s")]
    if len(totals) < 4:
        return None
    first, early = totals[len(totals) // 2 - 1]
    last, late = totals[-1]
    seconds = (late - early) / (last - first)
    return seconds if seconds > 0 and math.isfinite(seconds) else None


def describe(calibration: Calibration, found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Returns rows of a table: name, measured value, share of the peak."""
    width, speed = found["products"][-1]
    sheet = f"{GPUS[calibration.gpu].memory_gib:.1f} by the data sheet"
    rows = [
        (f"products, width {width}", f"{speed / 1e12:.3g} TFLOP/s", f"{calibration.products:.3f} of wide ones"),
        ("half of it at width", f"{calibration.half_width:.0f}", ""),
        ("attention", f"{found['attention'] / 1e12:.3g} TFLOP/s", f"{calibration.attention:.3f}"),
        ("memory", f"{found['memory'] / 1e9:.3g} GB/s", f"{calibration.memory_share:.3f}"),
        ("overhead", f"{calibration.overhead_bytes / 2**20:.0f} MiB", ""),
        ("memory size", f"{calibration.memory_bytes / 2**30:.1f} GiB", sheet),
    ]
    if found["all_reduce"] is not None:
        share = calibration.network_share if calibration.link_share is None else calibration.link_share
        rows.append(("all-reduce", f"{found['all_reduce'] / 1e9:.3g} GB/s a rank", f"{share:.3f}"))
    return [*rows, ("a step", "", f"{calibration.efficiency:.3f} of its kernels alone")]


def calibrate(
    asked: TrialOptions, gpu_name: str | None, tell: Callable[[str], None]
) -> tuple[Calibration, dict[str, Any]] | None:
    """Measures kernels on the ranks of this machine, or of a job, and times a step on one.

    Returns the calibration, and the result of `measure`; None on ranks other than 0. Raises:
    ConfigError: The device or its name is unknown, or the model is recurrent. LaunchError.
    """
    if gpu_name is not None:
        find_gpu(gpu_name)
        gpu_name = gpu_name.lower()
    num_ranks = asked.cluster.size
    shape = asdict(shape_of(asked.loaded, asked.cluster.device))
    tell(f"kernels, on {plural(num_ranks, 'rank')}")
    if asked.place.is_started:
        facts = measure(dist.read_world(), shape)
        if asked.place.rank:
            return None
    else:
        facts = run_ranks("pretrain.doctor.calibrate:measure", num_ranks, shape, within_s=600.0)
    calibration = build_calibration(facts, gpu_name)
    tell(f"{_STEPS} steps of a small run of the config")
    timed = _time_step(asked, calibration, tell)
    if timed is None:
        tell("the steps could not be timed: with an efficiency of 1, predictions are too fast")
        return calibration, facts
    return with_step(calibration, *timed), facts


def _time_step(
    asked: TrialOptions, calibration: Calibration, tell: Callable[[str], None]
) -> tuple[float, float] | None:
    """Returns seconds of a step on one rank, predicted and measured; None if the run fails."""
    one = Cluster(1, 1, GPUS[calibration.gpu], calibration)
    stage = asked.loaded.engine.zero_stage
    small = small_overrides(asked.loaded, one, asked.folder, "steps", _STEPS, stage)
    overrides = [*asked.overrides, *small]
    trial = run_command(["launch", "local", asked.config, *overrides], asked.folder / "steps.log")
    if trial.exit_code != EXIT_OK:
        tell(f"the small run ended with exit code {trial.exit_code}: {trial.error}")
        return None
    measured = step_seconds(read_rows(RunDir(asked.folder / "steps").metrics))
    if measured is None:
        return None
    config = load_config(asked.config, overrides)
    batch = config.plan_ranks(1)
    layout = ParallelLayout(config.engine, batch.micro, batch.accumulation)
    return predict_rate(task_of(config), layout, one).step_s, measured


# Kernels alone, on all ranks at once, as they will run. The slowest rank counts. A CPU is measured
# with one thread a rank, which is what `plan` calls a CPU.
#
#     products    x W, and the two of its backward pass, at several widths     FLOP/s
#     attention   torch's kernel, forward and backward, all pairs counted      FLOP/s
#     memory      a copy: read once, written once                              bytes/s
#     overhead    memory of the device that a process takes before its tensors bytes
#     all-reduce  over all ranks                                               bytes/s a rank

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_WIDTHS = {"cuda": (1024, 2048, 4096, 8192), "cpu": (128, 256, 512, 1024)}  # of products
_ROWS = {"cuda": 8192, "cpu": 512}  # of products
_COPIED = {"cuda": 2**30, "cpu": 2**27}  # bytes
_SUMMED = {"cuda": 2**28, "cpu": 2**24}  # bytes of an all-reduce
_REPEATS = {"cuda": 10, "cpu": 3}


def measure(world: World, arguments: dict[str, Any]) -> dict[str, Any]:
    """Measures on every rank; returns the least of all, as JSON values. Collective."""
    shape = KernelShape(**arguments)
    device = shape.device
    torch = import_torch()
    if device == "cpu":
        torch.set_num_threads(1)
    take_device(torch, world, device)
    overhead = _used_bytes(torch, device)
    start_group(torch, world, device)
    dtype = getattr(torch, _DTYPES[shape.precision])
    mine = {
        "products": [[width, _products(torch, width, device, dtype)] for width in _WIDTHS[device]],
        "attention": _attention(torch, shape, dtype),
        "memory": _memory(torch, device),
        "overhead_bytes": overhead,
        "memory_bytes": int(torch.cuda.mem_get_info()[1]) if device == "cuda" else read_memory()[0],
        "host": socket.gethostname(),
    }
    speed = all_reduce_speed(torch, world, device, _SUMMED[device]) if world.size > 1 else None
    mine["group_bytes"] = max(0, _used_bytes(torch, device) - overhead)
    measures = dist.gather_objects(mine)
    torch.distributed.destroy_process_group()
    rows = zip(*(one["products"] for one in measures), strict=True)  # a width each, of all ranks
    processor = platform.processor() or platform.machine()
    return {
        "products": [min(row) for row in rows],
        **{name: min(one[name] for one in measures) for name in ("attention", "memory", "memory_bytes")},
        "overhead_bytes": max(one["overhead_bytes"] for one in measures),
        "group_bytes": None if speed is None else max(one["group_bytes"] for one in measures),
        "all_reduce": speed,
        "host": mine["host"],
        "num_hosts": len({one["host"] for one in measures}),
        "num_ranks": world.size,
        "device": torch.cuda.get_device_name() if device == "cuda" else processor,
        "versions": {"torch": torch.__version__, **build_versions(torch)},
        "shape": arguments,
    }


def _seconds(torch: Any, device: str, run: Callable[[], Any]) -> float:
    """Returns the fastest of some calls after two that warm up: other load can only add."""
    took = []
    for _ in range(_REPEATS[device] + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - begun)
    return min(took[2:])


def _products(torch: Any, width: int, device: str, dtype: Any) -> float:
    rows = _ROWS[device]
    x = torch.randn((rows, width), device=device, dtype=dtype)
    weight = torch.randn((width, 4 * width), device=device, dtype=dtype)
    grad = torch.randn((rows, 4 * width), device=device, dtype=dtype)
    seconds = _seconds(torch, device, lambda: (x @ weight, grad @ weight.T, x.T @ grad))
    return 3 * 2 * rows * width * 4 * width / seconds


def _attention(torch: Any, shape: KernelShape, dtype: Any) -> float:
    rows = max(1, (32_768 if shape.device == "cuda" else 1024) // shape.seq_len)
    size = (rows, shape.heads, shape.seq_len, shape.head_width)
    q, k, v = (torch.randn(size, device=shape.device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn(size, device=shape.device, dtype=dtype)

    def run() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)
        torch.autograd.grad(out, (q, k, v), grad)

    # Scores and mixing forward, twice that backward, nothing recomputed: as in plan/flops.py.
    flops = 3 * 4 * rows * shape.heads * shape.seq_len**2 * shape.head_width
    return flops / _seconds(torch, shape.device, run)


def _memory(torch: Any, device: str) -> float:
    source = torch.zeros(_COPIED[device] // 4, dtype=torch.float32, device=device)
    target = torch.ones_like(source)
    return 2 * _COPIED[device] / _seconds(torch, device, lambda: target.copy_(source))


def _used_bytes(torch: Any, device: str) -> int:
    """Returns bytes in use beyond tensors of this process; on a GPU, other processes count too."""
    if device == "cpu":
        return 0  # `plan` does not count the 600 MB of host memory that a process takes
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())
