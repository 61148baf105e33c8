"""Measured speed of kernels: matrix products, attention, memory, all-reduce."""

import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from pretrain import dist
from pretrain.dist import World
from pretrain.doctor.check import this_host
from pretrain.doctor.machine import read_memory
from pretrain.doctor.rank_checks import all_reduce_speed, build_versions, import_torch, start_group, take_device

# What a device reaches: kernels alone, all ranks at once, as they will run.
#
#     products    x W, and the two of its backward pass, at several widths     FLOP/s
#     attention   torch's kernel, forward and backward, all pairs counted      FLOP/s
#     memory      a copy: read once, written once                              bytes/s
#     overhead    what a process takes of the device before its first tensor   bytes
#     all-reduce  over all ranks                                               bytes/s a rank
#
# The slowest rank counts. A CPU is measured with one thread a rank, which is what `plan` calls a
# CPU.


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of the measurement: widths and rows of products, bytes of a copy and of an all-reduce, calls of each."""

    widths: tuple[int, ...]
    rows: int
    copied: int
    summed: int
    repeats: int


_SIZES = {
    "cuda": _Sizes((1024, 2048, 4096, 8192), rows=8192, copied=2**30, summed=2**28, repeats=10),
    "cpu": _Sizes((128, 256, 512, 1024), rows=512, copied=2**27, summed=2**24, repeats=3),
}


@dataclass(frozen=True, slots=True)
class KernelShape:
    """The part of a config that determines the speed of its kernels.

    Attributes:
        device: `cuda` or `cpu`.
        precision: `engine.precision`.
        heads: Attention heads.
        head_width: Width of a head.
        seq_len: Tokens per row.
        causal: Whether the mask is causal.
    """

    device: str
    precision: str
    heads: int
    head_width: int
    seq_len: int
    causal: bool


def measure_task(world: World, arguments: dict[str, Any]) -> dict[str, Any]:
    """Runs `measure` as a rank started by `run_ranks`."""
    return measure(world, KernelShape(**arguments))


def measure(world: World, shape: KernelShape) -> dict[str, Any]:
    """Measures on every rank at once; returns the least of all, as JSON values. Collective.

    Raises:
        LaunchError: torch cannot be imported, or the ranks do not meet.
    """
    torch = import_torch()
    if shape.device == "cpu":
        torch.set_num_threads(1)
    take_device(torch, world, shape.device)
    overhead = _used_bytes(torch, shape.device)
    start_group(torch, world, shape.device)
    sizes = _SIZES[shape.device]
    dtype = getattr(torch, _DTYPES[shape.precision])
    mine = {
        "products": [[width, _products(torch, width, shape.device, dtype)] for width in sizes.widths],
        "attention": _attention(torch, shape, dtype),
        "memory": _memory(torch, shape.device, sizes.copied),
        "overhead_bytes": overhead,
        "memory_bytes": _memory_bytes(torch, shape.device),
        "host": this_host(),
    }
    speed = all_reduce_speed(torch, world, shape.device, sizes.summed) if world.size > 1 else None
    mine["group_bytes"] = max(0, _used_bytes(torch, shape.device) - overhead) if world.size > 1 else None
    found = dist.gather_objects(mine)
    device = torch.cuda.get_device_name() if shape.device == "cuda" else platform.processor() or platform.machine()
    hosts = len({one["host"] for one in found})
    products = [[width, min(one["products"][at][1] for one in found)] for at, width in enumerate(sizes.widths)]
    answer = {
        "products": products,
        **{name: min(one[name] for one in found) for name in ("attention", "memory", "memory_bytes")},
        "overhead_bytes": max(one["overhead_bytes"] for one in found),
        "group_bytes": None if speed is None else max(one["group_bytes"] for one in found),
        "all_reduce": speed,
        "host": mine["host"],
        "num_hosts": hosts,
        "num_ranks": world.size,
        "device": device,
        "versions": {"torch": torch.__version__, **build_versions(torch)},
        "shape": asdict(shape),
    }
    torch.distributed.destroy_process_group()
    return answer


def _seconds(torch: Any, device: str, run: Callable[[], Any]) -> float:
    """Returns the fastest of some calls, after some that warm up: what else runs here can only add."""
    repeats = _SIZES[device].repeats
    took = []
    for number in range(repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= 2:
            took.append(time.perf_counter() - begun)
    return min(took)


def _products(torch: Any, width: int, device: str, dtype: Any) -> float:
    rows = _SIZES[device].rows
    x, weight = (torch.randn(size, device=device, dtype=dtype) for size in ((rows, width), (width, 4 * width)))
    grad = torch.randn((rows, 4 * width), device=device, dtype=dtype)

    def run() -> None:
        _ = x @ weight
        _ = grad @ weight.T
        _ = x.T @ grad

    return 3 * 2 * rows * width * 4 * width / _seconds(torch, device, run)


def _attention(torch: Any, shape: KernelShape, dtype: Any) -> float:
    rows = max(1, (32_768 if shape.device == "cuda" else 1024) // shape.seq_len)
    size = (rows, shape.heads, shape.seq_len, shape.head_width)
    q, k, v = (torch.randn(size, device=shape.device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn(size, device=shape.device, dtype=dtype)

    def run() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)
        torch.autograd.grad(out, (q, k, v), grad)

    # Scores and mixing forward, twice that backward: as plan/flops.py counts, recomputed scores and all masks left out.
    flops = 3 * 4 * rows * shape.heads * shape.seq_len**2 * shape.head_width
    return flops / _seconds(torch, shape.device, run)


def _memory(torch: Any, device: str, num_bytes: int) -> float:
    source = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.ones_like(source)
    return 2 * num_bytes / _seconds(torch, device, lambda: target.copy_(source))


def _used_bytes(torch: Any, device: str) -> int:
    """Bytes that this process takes beside its tensors; on a GPU, whoever else is on it counts too."""
    if device == "cpu":
        return 0  # a process of ours takes some 600 MB of the host's memory, which is not what `plan` counts
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())


def _memory_bytes(torch: Any, device: str) -> int:
    return int(torch.cuda.mem_get_info()[1]) if device == "cuda" else read_memory()[0]
