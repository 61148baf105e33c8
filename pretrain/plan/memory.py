"""Memory of weights, gradients, optimizer state and communication buckets on a rank, by ZeRO stage.

Not here: activations, and the allocator's overhead.
"""

from dataclasses import dataclass
from typing import Literal

from pretrain.plan.trained import Values

_MIN_BUCKET = 2**20
_MAX_BUCKET = 50_000_000
_MAX_PERSISTENT = 100_000
# DeepSpeed wants all-gather buckets to be a multiple of its alignment, a small power of two.
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class BucketSizes:
    """DeepSpeed's buffer sizes, in elements. Fields carry the names of its `zero_optimization` section."""

    reduce_bucket_size: int  # gradients reduced at once
    allgather_bucket_size: int  # weights gathered at once after a step (stages 1 and 2)
    stage3_prefetch_bucket_size: int  # weights gathered ahead of use. 0 below stage 3
    stage3_param_persistence_threshold: int  # tensors smaller than this are kept whole. 0 below stage 3


def plan_buckets(num_parameters: int, zero_stage: int) -> BucketSizes:
    """Sizes the buckets from the model, instead of 5e8 elements whatever the model.

    Each is 5% of the parameters, at least 2^20 elements (4 MiB in fp32; with 2^18 a 5M model on gloo spent an eighth of
    its step on latency) and at most 5e7. A parameter larger than a bucket is reduced by itself. Tensors under a
    ten-thousandth of the model (norms and biases), at most 1e5 elements, persist: all of them together are a per cent
    or two of it.
    """
    share = num_parameters // 20 // _ALIGNMENT * _ALIGNMENT
    bucket = max(_MIN_BUCKET, min(_MAX_BUCKET // _ALIGNMENT * _ALIGNMENT, share))
    sharded_weights = zero_stage == 3
    return BucketSizes(
        reduce_bucket_size=bucket,
        allgather_bucket_size=bucket,
        stage3_prefetch_bucket_size=bucket if sharded_weights else 0,
        stage3_param_persistence_threshold=min(_MAX_PERSISTENT, num_parameters // 10_000) if sharded_weights else 0,
    )


STATE_BYTES = {"adamw": (8, 8), "muon": (4, 8), "adafactor": (0, 0)}
"""Bytes of fp32 optimizer state by `optim.kind`: for each value of a hidden matrix, and for each other."""


def state_bytes(optimizer: str, values: Values) -> int:
    """Returns the bytes of all optimizer state, in fp32; an unknown `optim.kind` counts as AdamW."""
    of_hidden, of_others = STATE_BYTES.get(optimizer, STATE_BYTES["adamw"])
    return of_hidden * values.hidden + of_others * (values.trained - values.hidden)


@dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """Bytes on a rank for each parameter of the model, buckets and activations not counted."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All three."""
        return self.weights + self.gradients + self.optimizer


def bytes_per_parameter(
    zero_stage: int,
    precision: Literal["fp32", "bf16", "fp16"],
    world_size: int,
    state: float = 8.0,
    *,
    offload_optimizer: bool = False,
    offload_params: bool = False,
) -> BytesPerParameter:
    """Returns the state of a rank's device per parameter (Rajbhandari et al. 2020, section 3 and figure 1).

    Replicated, fp32 has 4 + 4 + 8 bytes under AdamW (two moments), 16 bits 2 + 2 + 12 (an fp32 master weight and two
    moments). Stage 1 divides the optimizer's part by the number of ranks, stage 2 the gradients' too, stage 3 the
    weights' too. From stage 1 on DeepSpeed steps a copy of a rank's share, in fp32 4 bytes more than in the paper.
    Adafactor's rows and columns are too few to count.

    Args:
        zero_stage: ZeRO stage; 0 for DDP and one process.
        precision: Precision of the working weights.
        world_size: Number of ranks.
        state: Bytes of optimizer state a parameter: 8 under AdamW.
        offload_optimizer: True: master weights and optimizer state are in host memory.
        offload_params: True: working weights are in host memory, at stage 3.
    """
    working = 4 if precision == "fp32" else 2
    master = 0 if precision == "fp32" and not zero_stage else 4
    kept = 0.0 if offload_optimizer else master + state
    return BytesPerParameter(
        weights=0.0 if offload_params else working / (world_size if zero_stage >= 3 else 1),
        gradients=working / (world_size if zero_stage >= 2 else 1),
        optimizer=kept / (world_size if zero_stage >= 1 else 1),
    )
