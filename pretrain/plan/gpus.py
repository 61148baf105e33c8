"""Data sheets of GPUs, and the roofline's constants, fitted on published runs (docs/plan.md)."""

import difflib
import re
from dataclasses import dataclass

from pretrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GpuEfficiency:
    """Reached shares of the peak of a generation of GPUs."""

    products: float  # share that products of wide matrices reach
    half_width: float  # width at which they reach half of that share
    attention: float  # share that attention reaches, all pairs counted, masked or not


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of the roofline."""

    shares: dict[str, GpuEfficiency]  # reached shares of the peak, by generation
    passes: float  # times that elementwise kernels move activations and their gradients
    logit_bytes: float  # bytes moved for each score of the loss
    memory_share: float  # reached share of the memory bandwidth
    link_share: float  # reached share of the links within a node
    network_share: float  # reached share of the network
    hides: float  # share of the computation that communication can overlap with
    never_hidden: float  # share of communication that does not overlap
    latency_s: float  # latency of a collective
    latency_node_s: float  # further latency for each node
    host_bytes_s: float  # bandwidth between host and device, for each rank (PCIe 4, shared)


CONSTANTS = Constants(
    shares={
        "ampere": GpuEfficiency(products=0.73, half_width=383.0, attention=0.63),
        "hopper": GpuEfficiency(products=0.583, half_width=715.0, attention=0.35),
        "cpu": GpuEfficiency(products=0.5, half_width=64.0, attention=0.25),
    },
    passes=2.0,
    logit_bytes=16.0,
    memory_share=0.8,
    link_share=0.7,
    network_share=0.7,
    hides=0.8,
    never_hidden=0.1,
    latency_s=3e-5,
    latency_node_s=1e-6,
    host_bytes_s=1.2e10,
)


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
) -> Gpu:
    return Gpu(name, tflops * 1e12, fp32 * 1e12, gib, tb_s * 1e12, link_gb * 1e9, network_gb * 1e9, generation, fp8)


GPUS: dict[str, Gpu] = {
    "v100": _gpu("V100 32GB", 125, 15.7, 31.7, 0.9, 150, 12.5, "ampere"),
    "a10": _gpu("A10 24GB", 125, 31.2, 22.0, 0.6, 32, 6.25, "ampere"),
    "a40": _gpu("A40 48GB", 149.7, 37.4, 44.4, 0.696, 56, 12.5, "ampere"),
    "a100-40": _gpu("A100 40GB", 312, 19.5, 39.4, 1.555, 300, 25, "ampere"),
    "a100": _gpu("A100 80GB", 312, 19.5, 79.2, 2.039, 300, 25, "ampere"),
    "l4": _gpu("L4 24GB", 121, 30.3, 22.2, 0.3, 32, 6.25, "ampere", fp8=True),
    "l40s": _gpu("L40S 48GB", 362, 91.6, 44.4, 0.864, 32, 25, "ampere", fp8=True),
    "rtx4090": _gpu("RTX 4090 24GB", 165, 82.6, 23.6, 1.008, 32, 3.1, "ampere", fp8=True),
    "h100": _gpu("H100 SXM 80GB", 989, 67, 79.1, 3.35, 450, 50, "hopper", fp8=True),
    "h100-pcie": _gpu("H100 PCIe 80GB", 756, 51, 79.1, 2.0, 64, 25, "hopper", fp8=True),
    "h200": _gpu("H200 SXM 141GB", 989, 67, 139.8, 4.8, 450, 50, "hopper", fp8=True),
    "gh200": _gpu("GH200 96GB", 989, 67, 94.5, 4.0, 450, 50, "hopper", fp8=True),
    "b200": _gpu("B200 180GB", 2250, 80, 178.3, 8.0, 900, 50, "hopper", fp8=True),
    "mi250x": _gpu("MI250X, one of two dies, 64GB", 191.5, 47.9, 64.0, 1.6, 150, 25, "ampere"),
    "mi300x": _gpu("MI300X 192GB", 1307, 163.4, 191.7, 5.3, 448, 50, "hopper", fp8=True),
    # One core of a server with AVX-512 in fp32, and its share of the memory: a rough figure.
    "cpu": _gpu("CPU core", 0.1, 0.1, 8.0, 0.01, 1.0, 0.125, "cpu"),
}
"""GPUs by the name that `--gpu` takes."""

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
    found = (name for name in names if re.search(_PATTERNS.get(name, name.upper()), device))
    return next(found, None)
