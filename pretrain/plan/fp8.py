"""Times of the products of the blocks' matrices in bf16 and in FP8, casts included.

    bf16    FLOPs over a share of the peak that grows with width, more slowly than the roofline's: alone,
            with few rows, a small product does not fill the GPU
    FP8     the same FLOPs, GEMM_SPEEDUP times as fast; and casts of input, weight and output gradient,
            bytes over the memory's bandwidth, none faster than a kernel starts

A cast reads and writes what torchao's own roofline counts
(torchao/testing/training/roofline_utils.py, without fusion into the kernel before). The gain grows
with the smallest of M, K and N, the cost of casts does not: small products are slower in FP8.
"""

from collections import Counter
from dataclasses import dataclass

from pretrain.config.engine import EngineConfig
from pretrain.config.model.parts import counts_of
from pretrain.plan.cluster import Cluster
from pretrain.plan.params import parameter_shapes
from pretrain.plan.task import TrainingTask

GEMM_SPEEDUP = {"tensorwise": 1.65, "rowwise": 1.37}
"""Speed of an FP8 product over bf16, of twice the peak. Fitted on torchao's README, H100: speedups of two
shapes (0.80, 1.39), and of LLaMA-3 8B by `rowwise` (1.10); tested on the last by `tensorwise`
(1.25)."""
ALONE = (0.6, 600.0)
"""Share of the peak that wide products in bf16 reach there, and the width at which they reach half of it."""
KERNEL_S = 2e-6
"""Shortest kernel, as torchao has measured it on an H100."""

_KERNEL_BYTES = {
    "tensorwise": ((2, 0, 4), (2, 0, 3, 3)),  # maximum, its second stage, cast to both layouts
    "rowwise": ((5, 3), (3, 4, 3)),  # cast along one dimension, transpose, cast along the other
}
"""Bytes an element of each kernel of a cast: of an activation or its gradient, and of a weight."""


@dataclass(frozen=True, slots=True)
class Fp8Product:
    """A matrix of the blocks: its forward product [M, K] x [K, N], and seconds with both of its gradients."""

    name: str  # `attention.qkv`
    m: int  # tokens of a micro-batch
    k: int  # inputs
    n: int  # outputs
    count: int  # matrices of this name and shape
    bf16_s: float
    fp8_s: float

    @property
    def speedup(self) -> float:
        """Speed in FP8 over bf16."""
        return self.bf16_s / self.fp8_s


def cast_seconds(m: int, k: int, n: int, recipe: str, bandwidth: float) -> float:
    """Returns the seconds of the casts of a product and its gradients, at a bandwidth in bytes a second."""
    of_activation, of_weight = _KERNEL_BYTES[recipe]
    sizes = ((m * k, of_activation), (k * n, of_weight), (m * n, of_activation))
    return sum(max(KERNEL_S, each * size / bandwidth) for size, kernels in sizes for each in kernels)


def time_product(m: int, k: int, n: int, recipe: str, cluster: Cluster, width: int) -> tuple[float, float]:
    """Returns seconds in bf16 and in FP8, forward and backward; `width` is the model's."""
    constants, gpu = cluster.constants, cluster.gpu
    share, half_width = ALONE
    bf16_s = 6 * m * k * n / (gpu.flops * share * width / (width + half_width))
    casts = cast_seconds(m, k, n, recipe, gpu.memory_bytes_s * constants.memory_share)
    return bf16_s, bf16_s / GEMM_SPEEDUP[recipe] + casts


def fp8_products(task: TrainingTask, micro: int, recipe: str, cluster: Cluster) -> list[Fp8Product]:
    """Returns the distinct matrices of the blocks; none of a recurrent model."""
    counts: Counter[tuple[str, int, int, int]] = Counter()
    target, source = micro * task.lengths.target, micro * (task.lengths.source or task.lengths.target)
    for name, shape in parameter_shapes(task.model).items():
        stack, _, rest = name.partition(".blocks.")
        if rest and len(shape) == 2:
            layer = rest.partition(".")[2].removesuffix(".weight")
            tokens = source if stack == "encoder" or layer == "cross.key_value" else target
            counts[layer, tokens, shape[1], shape[0]] += 1
    width = counts_of(task.model).width
    return [
        Fp8Product(name, m, k, n, count, *time_product(m, k, n, recipe, cluster, width))
        for (name, m, k, n), count in counts.items()
    ]


def time_ratio(products: list[Fp8Product]) -> float:
    """Returns the time of all products in FP8 over that in bf16."""
    bf16_s = sum(product.count * product.bf16_s for product in products)
    return sum(product.count * product.fp8_s for product in products) / bf16_s if bf16_s else 1.0


def refusal(engine: EngineConfig, cluster: Cluster) -> str:
    """Returns why FP8 cannot be used with an engine or on a GPU; empty: it can."""
    if not cluster.gpu.has_fp8:
        return f"{cluster.gpu.name} has no FP8"
    if engine.precision != "bf16" or (engine.zero_stage == 3 and not engine.recomputes_all):
        return "FP8 needs precision=bf16, and zero_stage=0, 1 or 2 or activation_checkpointing=full"
    return ""
