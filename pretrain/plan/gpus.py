"""Data sheets of GPUs, and the roofline's constants, fitted on published runs (docs/plan.md)."""

import difflib
import re
from dataclasses import dataclass

from pretrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GpuEfficiency:
    """Reached shares of the peaks of a generation of GPUs."""

    products: float  # speed of products of wide matrices in training, over the best single product
    half_width: float  # width at which products reach half of it
    flash: float  # share of the peak that FlashAttention reaches on long rows, all pairs counted
    cudnn: float  # the same by the kernel that torch takes for rows of one document
    half_keys: float = 225.0  # keys of a row at which a kernel of attention reaches half of it
    compiled_passes: float = 3.6  # times that kernels of compiled blocks move what activations keep
    eager_passes: float = 8.0  # the same by plain blocks

    def of_peak(self, gpu: "Gpu", width: int) -> float:
        """Returns the share of the peak that products of a model of this width reach."""
        return gpu.best_product * self.products * width / (width + self.half_width)

    def attention(self, kernel: str, keys: int) -> float:
        """Returns the share of the peak that a kernel, `flash` or `cudnn`, reaches on rows."""
        share = self.cudnn if kernel == "cudnn" else self.flash
        return share * keys / (keys + self.half_keys)


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of the roofline."""

    shares: dict[str, GpuEfficiency]  # reached shares of the peak, by generation
    logit_bytes: float  # bytes moved for each score of the loss
    memory_share: float  # reached share of the memory bandwidth
    update_share: float  # share of that bandwidth that the optimizer's update reaches
    launch_s: float  # time in which the host launches a kernel, its Python included
    link_share: float  # reached share of the links within a node
    network_share: float  # reached share of the network
    hides: float  # share of the computation that communication can overlap with
    never_hidden: float  # share of communication that does not overlap
    latency_s: float  # latency of a collective
    latency_node_s: float  # further latency for each node
    host_bytes_s: float  # bandwidth between host and device, for each rank (PCIe 4, shared)


CONSTANTS = Constants(
    shares={
        "ampere": GpuEfficiency(products=0.94, half_width=200.0, flash=0.62, cudnn=0.62),
        "hopper": GpuEfficiency(products=0.81, half_width=200.0, flash=0.54, cudnn=0.84),
        "cpu": GpuEfficiency(0.5, 64.0, 0.25, 0.25, 0.0, compiled_passes=2.0, eager_passes=2.0),
    },
    logit_bytes=16.0,
    memory_share=0.88,
    update_share=1.0,
    launch_s=6e-5,
    link_share=0.7,
    network_share=0.7,
    hides=0.8,
    never_hidden=0.1,
    latency_s=3e-5,
    latency_node_s=1e-6,
    host_bytes_s=1.2e10,
)
"""Six of these are free, and fitted on 14 published runs and 9 of our own steps: products of both
generations, the half width, and the shares of three kernels of attention (docs/plan.md).
Others were measured or counted:

    half_keys         pytorch/benchmark, pull request 2391: FlashAttention 3, 512 to 16,384 keys
    compiled_passes   bytes that Inductor's kernels of a block move: 3.5 (LLaMA), 3.8 (GPT-2)
    eager_passes      between 5.0, with fused norms, and 12.5, without; fitted, it is 8.1
    memory_share      a copy on an H200
    launch_s          11M parameters on an H200: 58 ms for 976 launches, of which kernels take 24
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device, by its maker's data sheet."""

    name: str
    flops: float  # dense bf16 FLOP/s; where there is no bf16, fp16
    flops_fp32: float  # FLOP/s in fp32, without tf32
    memory_gib: float  # memory that the driver leaves, about 1.5% less than is sold
    memory_bytes_s: float  # memory bandwidth
    link_bytes_s: float  # NVLink to the others of its node, all links, one direction; else PCIe
    network_bytes_s: float  # share of the node's network, one direction, as in a DGX H100 or A100
    generation: str  # key of `Constants.shares`
    best_product: float  # share of the peak that the best single product reaches
    has_fp8: bool = False  # true: products in FP8 at twice the peak, which is Ada, Hopper, Blackwell, CDNA 3


def _gpu(
    name: str,
    tflops: float,
    fp32: float,
    gib: float,
    tb_s: float,
    link_gb: float,
    network_gb: float,
    generation: str,
    fp8: bool = False,
    best: float = 0.8,
) -> Gpu:
    speeds = (link_gb * 1e9, network_gb * 1e9)
    return Gpu(name, tflops * 1e12, fp32 * 1e12, gib, tb_s * 1e12, *speeds, generation, best, fp8)


GPUS: dict[str, Gpu] = {
    "v100": _gpu("V100 32GB", 125, 15.7, 31.7, 0.9, 150, 12.5, "ampere"),
    "a10": _gpu("A10 24GB", 125, 31.2, 22.0, 0.6, 32, 6.25, "ampere"),
    "a40": _gpu("A40 48GB", 149.7, 37.4, 44.4, 0.696, 56, 12.5, "ampere"),
    "a100-40": _gpu("A100 40GB", 312, 19.5, 39.4, 1.555, 300, 25, "ampere", best=0.869),
    "a100": _gpu("A100 80GB", 312, 19.5, 79.2, 2.039, 300, 25, "ampere", best=0.869),
    "l4": _gpu("L4 24GB", 121, 30.3, 22.2, 0.3, 32, 6.25, "ampere", fp8=True),
    "l40s": _gpu("L40S 48GB", 362, 91.6, 44.4, 0.864, 32, 25, "ampere", fp8=True),
    "rtx4090": _gpu("RTX 4090 24GB", 165, 82.6, 23.6, 1.008, 32, 3.1, "ampere", fp8=True),
    "rtx5090": _gpu("RTX 5090 32GB", 209.5, 104.8, 31.4, 1.792, 64, 3.1, "ampere", fp8=True),
    "h100": _gpu("H100 SXM 80GB", 989, 67, 79.1, 3.35, 450, 50, "hopper", fp8=True, best=0.803),
    "h100-pcie": _gpu("H100 PCIe 80GB", 756, 51, 79.1, 2.0, 64, 25, "hopper", fp8=True),
    "h200": _gpu("H200 SXM 141GB", 989, 67, 139.8, 4.8, 450, 50, "hopper", fp8=True, best=0.803),
    "gh200": _gpu("GH200 96GB", 989, 67, 94.5, 4.0, 450, 50, "hopper", fp8=True, best=0.838),
    "b200": _gpu("B200 180GB", 2250, 80, 178.3, 8.0, 900, 50, "hopper", fp8=True, best=0.776),
    "mi250x": _gpu("MI250X, one of two dies, 64GB", 191.5, 47.9, 64.0, 1.6, 150, 25, "ampere"),
    "mi300x": _gpu("MI300X 192GB", 1307, 163.4, 191.7, 5.3, 448, 50, "hopper", fp8=True, best=0.514),
    # One core of a server with AVX-512 in fp32, and its share of the memory: a rough figure.
    "cpu": _gpu("CPU core", 0.1, 0.1, 8.0, 0.01, 1.0, 0.125, "cpu", best=1.0),
}
"""GPUs by the name that `--gpu` takes.

By the data sheets of their makers: NVIDIA's of the A100, L40S, H100, H200 and DGX B200, and the
whitepapers of the Ada and RTX Blackwell architectures (products that sum in fp32); AMD's of the
Instinct MI300X. `best` is the maximum achievable matmul FLOPS of ml-engineering (Bekman 2026), by the
newest torch there: A100 86.9%, H100 and H200 80.3%, GH200 83.8%, B200 77.6%, MI300X 51.4%; 0.8 is
assumed where it has none.
"""

_PATTERNS = {
    "cpu": "(?!)",
    "a10": r"\bA10G?\b",
    "a40": r"\bA40\b",
    "a100-40": "A100.*40GB",
    "h100": "H100(?! NVL)",
    "h100-pcie": "H100 PCIe",
    "h200": r"\bH200(?! NVL)",
    "l4": r"\bL4\b",
    "rtx4090": "RTX 4090",
    "rtx5090": "RTX 5090",
}
"""Patterns of a driver's device name, where that does not contain the name in capitals."""


def find_gpu(name: str) -> Gpu:
    """Returns a GPU by the name that `--gpu` takes. Raises: ConfigError, with the nearest ones."""
    if name.lower() not in GPUS:
        near = difflib.get_close_matches(name.lower(), GPUS, n=3, cutoff=0.3) or list(GPUS)
        raise ConfigError(f"unknown GPU {name!r}", where="--gpu", fix=f"use {' or '.join(near)}")
    return GPUS[name.lower()]


def name_of_device(device: str) -> str | None:
    """Returns the name in `GPUS` of a driver's device name; None: unknown."""
    # The longest first: A100 is in the name of an A100 of 40 GB, H200 in that of a GH200.
    names = sorted(GPUS, key=len, reverse=True)
    matches = (name for name in names if re.search(_PATTERNS.get(name, name.upper()), device))
    return next(matches, None)
