"""`pretrain doctor --calibrate`: measured speeds as constants of `pretrain plan`, each alone.

Six numbers of a rank: products, a copy, attention at two lengths by the kernel that training takes, a
block of the config, an update, and launches; and the all-reduce of all.
"""

import platform
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from pretrain import dist
from pretrain.config.load import load_config
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.dist import World
from pretrain.doctor.block_time import block_passes, has_blocks, launch_seconds, time_block, update_speed
from pretrain.doctor.machine import read_memory
from pretrain.doctor.rank_checks import all_reduce_speed, build_versions, import_torch, start_group, take_device
from pretrain.doctor.small import TrialOptions
from pretrain.doctor.spawn import run_ranks
from pretrain.errors import ConfigError
from pretrain.plan.cluster import Calibration, fit_products
from pretrain.plan.gpus import GPUS, Gpu, find_gpu, name_of_device
from pretrain.utils.units import plural

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
    attention: str = "auto"  # `engine.attention`
    masked: bool = False  # true: documents of a row do not attend to each other


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
    engine, masked = config.engine, config.data.document_mask
    return KernelShape(
        device, engine.precision, stack.heads, stack.per_head_width, length, causal, engine.attention, masked
    )


def build_calibration(found: dict[str, Any], gpu_name: str | None, config: RunConfig | None = None) -> Calibration:
    """Converts the result of `measure` to shares of a data sheet.

    Args:
        found: The result.
        gpu_name: Name in `GPUS`; None: by the device's.
        config: The config whose block was timed. None: none was.

    Raises:
        ConfigError: The device is unknown.
    """
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
    attention, half_keys = fit_products([(keys, speed / peak) for keys, speed in found["attention"]])
    calibration = Calibration(
        gpu=name,
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
        products=products,
        half_width=half_width,
        attention=attention,
        half_keys=half_keys,
        update_share=found["update"] / found["memory"],
        memory_share=found["memory"] / gpu.memory_bytes_s,
        link_share=link,
        network_share=network,
        **{name: found[name] for name in _AS_MEASURED},
    )
    if config is None or found["block"] is None:
        return calibration
    passes = block_passes(config, gpu, calibration.constants(gpu), found["block"])
    launch_s = None if is_cpu else launch_seconds(config.engine, "cuda", found["launched"])
    return replace(calibration, passes=passes, launch_s=launch_s)


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


def describe(calibration: Calibration, found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Returns rows of a table: name, measured value, share of the peak."""
    width, speed = found["products"][-1]
    keys, attention = found["attention"][-1]
    sheet = f"{GPUS[calibration.gpu].memory_gib:.1f} by the data sheet"
    rows = [
        (f"products, width {width}", f"{speed / 1e12:.3g} TFLOP/s", f"{calibration.products:.3f} of wide ones"),
        ("half of it at width", f"{calibration.half_width:.0f}", ""),
        (f"attention, {keys} keys", f"{attention / 1e12:.3g} TFLOP/s", f"{calibration.attention:.3f} of long rows"),
        ("memory", f"{found['memory'] / 1e9:.3g} GB/s", f"{calibration.memory_share:.3f}"),
        ("overhead", f"{calibration.overhead_bytes / 2**20:.0f} MiB", ""),
        ("memory size", f"{calibration.memory_bytes / 2**30:.1f} GiB", sheet),
    ]
    if found["all_reduce"] is not None:
        share = calibration.network_share if calibration.link_share is None else calibration.link_share
        rows.append(("all-reduce", f"{found['all_reduce'] / 1e9:.3g} GB/s a rank", f"{share:.3f}"))
    rows.append(("update", f"{found['update'] / 1e9:.3g} GB/s", f"{calibration.update_share:.3f} of a copy"))
    if calibration.passes is not None:
        moved = f"moves what it keeps {calibration.passes:.1f} times"
        rows.append(("a block", f"{1e3 * found['block']:.3g} ms", moved))
    if calibration.launch_s is not None:
        rows.append(("a launch", f"{1e6 * calibration.launch_s:.3g} us", ""))
    return rows


def calibrate(
    asked: TrialOptions, gpu_name: str | None, tell: Callable[[str], None]
) -> tuple[Calibration, dict[str, Any]] | None:
    """Measures on the ranks of this machine, or of a job.

    Returns the calibration, and the result of `measure`; None on ranks other than 0. Raises:
    ConfigError: The device or its name is unknown, or the model is recurrent. LaunchError.
    """
    if gpu_name is not None:
        find_gpu(gpu_name)
        gpu_name = gpu_name.lower()
    num_ranks = asked.cluster.size
    shape = asdict(shape_of(asked.loaded, asked.cluster.device))
    arguments = {"shape": shape}
    if has_blocks(asked.loaded):
        arguments["trial"] = {"config": asked.config, "overrides": asked.overrides}
    tell(f"kernels, a block, an update and launches, on {plural(num_ranks, 'rank')}")
    if asked.place.is_started:
        facts = measure(dist.read_world(), arguments)
        if asked.place.rank:
            return None
    else:
        facts = run_ranks("pretrain.doctor.calibrate:measure", num_ranks, arguments, within_s=600.0)
    return build_calibration(facts, gpu_name, asked.loaded), facts


# Kernels alone, on all ranks at once, as they will run. The slowest rank counts. A CPU is measured
# with one thread a rank, which is what `plan` calls a CPU.
#
#     products    x W, and the two of its backward pass, at several widths     FLOP/s
#     attention   torch's kernel, forward and backward, all pairs counted      FLOP/s
#     memory      a copy: read once, written once                              bytes/s
#     block       both passes of a block of the config, on a micro-batch                     s
#     launched    the same on so few tokens that the device waits for its host               s
#     update      AdamW on one tensor                          bytes/s
#     overhead    memory of the device that a process takes before its tensors bytes
#     all-reduce  over all ranks                                               bytes/s a rank

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_WIDTHS = {"cuda": (1024, 2048, 4096, 8192), "cpu": (128, 256, 512, 1024)}  # of products
_ROWS = {"cuda": 8192, "cpu": 512}  # of products
_COPIED = {"cuda": 2**30, "cpu": 2**27}  # bytes
_SUMMED = {"cuda": 2**28, "cpu": 2**24}  # bytes of an all-reduce
_REPEATS = {"cuda": 10, "cpu": 3}
_WARM_S = {"cuda": 0.5, "cpu": 0.0}


def measure(world: World, arguments: dict[str, Any]) -> dict[str, Any]:
    """Measures on every rank; returns the least of all, as JSON values. Collective.

    Args:
        world: This rank's place.
        arguments: `shape`, and `trial` with the config of a block; without it there is none.
    """
    shape = KernelShape(**arguments["shape"])
    device = shape.device
    torch = import_torch()
    if device == "cpu":
        torch.set_num_threads(1)
    take_device(torch, world, device)
    overhead = _used_bytes(torch, device)
    start_group(torch, world, device)
    mine = _measure_kernels(torch, shape)
    mine["overhead_bytes"] = overhead
    speed = all_reduce_speed(torch, world, device, _SUMMED[device]) if world.size > 1 else None
    mine["group_bytes"] = max(0, _used_bytes(torch, device) - overhead)
    mine |= _measure_parts(torch, device, arguments.get("trial"))
    ranks = dist.gather_objects(mine)
    torch.distributed.destroy_process_group()
    processor = platform.processor() or platform.machine()
    return {
        **_slowest(ranks),
        "group_bytes": None if speed is None else max(one["group_bytes"] for one in ranks),
        "all_reduce": speed,
        "host": mine["host"],
        "num_hosts": len({one["host"] for one in ranks}),
        "num_ranks": world.size,
        "device": torch.cuda.get_device_name() if device == "cuda" else processor,
        "versions": {"torch": torch.__version__, **build_versions(torch)},
        "shape": arguments["shape"],
    }


def _measure_kernels(torch: Any, shape: KernelShape) -> dict[str, Any]:
    """Returns the speeds of kernels on this rank, and its memory."""
    device, dtype = shape.device, getattr(torch, _DTYPES[shape.precision])
    return {
        "products": [[width, _products(torch, width, device, dtype)] for width in _WIDTHS[device]],
        "attention": [[keys, _attention(torch, shape, keys, dtype)] for keys in _lengths(shape.seq_len)],
        "memory": _memory(torch, device),
        "memory_bytes": int(torch.cuda.mem_get_info()[1]) if device == "cuda" else read_memory()[0],
        "host": socket.gethostname(),
    }


def _measure_parts(torch: Any, device: str, trial: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the speed of an update, and the seconds of a block of a trial's config; None: there is none."""
    timed = partial(_seconds, torch, device)
    parts: dict[str, Any] = {"update": update_speed(torch, device, timed), "block": None, "launched": None}
    if trial is None:
        return parts
    config = load_config(trial["config"], trial["overrides"], extensions="import")
    return parts | time_block(torch, config, device, timed)


def _slowest(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the least speeds of all ranks, and their longest times."""
    slowest: dict[str, Any] = {"overhead_bytes": max(one["overhead_bytes"] for one in ranks)}
    for name in ("products", "attention"):
        rows = zip(*(one[name] for one in ranks), strict=True)  # a width or length each, of all ranks
        slowest[name] = [min(row) for row in rows]
    for name in ("memory", "update", "memory_bytes"):
        slowest[name] = min(one[name] for one in ranks)
    for name in ("block", "launched"):
        times = [one[name] for one in ranks]
        slowest[name] = None if None in times else max(times)
    return slowest


def _seconds(torch: Any, device: str, run: Callable[[], Any]) -> float:
    """Returns the fastest of some calls after those that warm up: other load can only add.

    A GPU warms up for half a second, after which it runs as slowly as in a long run.
    """
    took: list[float] = []
    until = time.perf_counter() + _WARM_S[device]
    while len(took) < 2 or time.perf_counter() < until:
        took.append(0.0)
        run()
        if device == "cuda":
            torch.cuda.synchronize()
    took.clear()
    for _ in range(_REPEATS[device]):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - begun)
    return min(took)


def _products(torch: Any, width: int, device: str, dtype: Any) -> float:
    rows = _ROWS[device]
    x = torch.randn((rows, width), device=device, dtype=dtype)
    weight = torch.randn((width, 4 * width), device=device, dtype=dtype)
    grad = torch.randn((rows, 4 * width), device=device, dtype=dtype)
    seconds = _seconds(torch, device, lambda: (x @ weight, grad @ weight.T, x.T @ grad))
    return 3 * 2 * rows * width * 4 * width / seconds


def _lengths(seq_len: int) -> tuple[int, ...]:
    """Returns the lengths of rows at which attention is measured, the config's and a quarter of it."""
    return (max(1, seq_len // 4), max(4, seq_len))


def _attention(torch: Any, shape: KernelShape, length: int, dtype: Any) -> float:
    from pretrain.model.backends import build_backend
    from pretrain.model.backends.backend import AttentionNeeds, MaskSize
    from pretrain.types import AttentionMask

    rows = max(1, (32_768 if shape.device == "cuda" else 1024) // length)
    device = torch.device(shape.device)
    size = (rows, length, shape.heads, shape.head_width)
    q, k, v = (torch.randn(size, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn(size, device=device, dtype=dtype)
    # One document a row: all pairs are computed, by the kernel that rows of several have.
    on_host = torch.zeros((rows, length), dtype=torch.int32) if shape.masked else None
    documents_BT = None if on_host is None else on_host.to(device)
    mask = AttentionMask(
        causal=shape.causal,
        documents_BT=documents_BT,
        on_host=AttentionMask(causal=shape.causal, documents_BT=on_host),
    )
    backend = build_backend(shape.attention, AttentionNeeds(device, dtype, shape.head_width))
    prepared = backend.prepare(mask, MaskSize(rows, length, length, device))

    def run() -> None:
        torch.autograd.grad(backend.attend(q, k, v, prepared), (q, k, v), grad)

    # Scores and mixing forward, twice that backward, nothing recomputed: as in plan/flops.py.
    flops = 3 * 4 * rows * shape.heads * length**2 * shape.head_width
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
