"""Work of a step beside its arithmetic: bytes of an update, kernel launches, attention's kernel.

Bytes were counted operation by operation at one rank, each operand once (AdamW: a gradient, a master
weight and two moments read, the latter three written). Launches are those of the dry CUDA runtime
(`tests/cuda_dry/torch-2.13.txt`).
"""

from typing import NamedTuple

from pretrain.config.engine import EngineConfig
from pretrain.config.model.parts import counts_of
from pretrain.kinds.optimizers import OPTIMIZERS
from pretrain.plan.attention_table import fastest_kernel
from pretrain.plan.memory import kept_bytes
from pretrain.plan.params import parameter_shapes
from pretrain.plan.task import ParallelLayout, TrainingTask


class EngineTraffic(NamedTuple):
    """Bytes that an engine moves for a gradient, and for the update of a value that a rank owns."""

    copied: int  # gradient to bucket and back, for values of 2 bytes
    owned: int  # norm, clip, conversion to fp32 and back, beside the optimizer's own


REPLICATED = EngineTraffic(0, 12)
ZERO = (EngineTraffic(12, 30), EngineTraffic(18, 42), EngineTraffic(18, 42), EngineTraffic(24, 42))
"""Traffic of DDP and one process in fp32, and of DeepSpeed's stages."""
MASTERS = {True: EngineTraffic(0, 6), False: EngineTraffic(0, 24)}
"""Traffic of DDP and one process in 16 bits, by whether one kernel clips, updates and copies."""


def update_traffic(task: TrainingTask, layout: ParallelLayout, world_size: int, device: str = "cuda") -> float:
    """Returns the bytes that gradients and their update move on a rank in a step."""
    engine, count, trained = layout.engine, layout.accumulation, task.values.trained
    here = trained - task.elsewhere
    traffic = REPLICATED if engine.is_replicated else ZERO[engine.zero_stage]
    if engine.has_masters:
        is_fused = OPTIMIZERS[task.optimizer].fused is not None
        traffic = MASTERS[is_fused and engine.fuses_update(device)]
    size = engine.gradient_bytes
    # Sums of gradients; and under autocast casts of weights and of their gradients.
    moved = 3.0 * size * (count - 1) * here
    if engine.autocasts:
        moved += 2 * (4 + engine.compute_bytes) * count * here
    reductions = count if engine.zero_stage >= 2 else 1
    moved += traffic.copied * size / 2 * reductions * here
    owners = world_size if engine.zero_stage else 1
    owned = float(traffic.owned)
    if engine.offload_optimizer == "none":
        owned += 2 * (4 + kept_bytes(task) / trained) + 4
    return moved + owned * trained / owners


LAUNCHES = {True: 34, False: 55}
"""Launches of a block in both passes, by whether it is compiled."""
AGAIN, A_STEP = 13, 40
"""Launches of a block that is run again, and of a step."""
AROUND, A_TENSOR = {True: 50, False: 85}, {True: 0, False: 2}
"""Launches of embedding and loss, and of a tensor, by whether our own engine steps flat masters.

Others copy gradients to buckets, or cast weights; flat tensors take 28 an update, of any model.
"""


def count_launches(task: TrainingTask, layout: ParallelLayout, recompute: float, device: str) -> float:
    """Returns the kernels that the host launches in a step; 0 on a CPU."""
    if device == "cpu":
        return 0.0
    blocks = counts_of(task.model).num_blocks
    engine = layout.engine
    each = LAUNCHES[engine.compiles(device)] + AGAIN * recompute
    tensors = len(task.trained.names if task.trained else parameter_shapes(task.model))
    of_passes = layout.accumulation * (blocks * each + AROUND[engine.has_masters])
    return of_passes + A_TENSOR[engine.has_masters] * tensors + A_STEP


def attention_kernel(task: TrainingTask, engine: EngineConfig) -> str:
    """Returns the kernel of attention: of rows of one document in 16 bits by the table, else flash."""
    whole = not task.masked and task.window is None and engine.precision != "fp32"
    if whole and engine.attention == "auto":
        return fastest_kernel(False, task.lengths.target)
    return "cudnn" if whole and engine.attention == "sdpa" else "flash"
