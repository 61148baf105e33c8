"""The memory of one rank, on its device and on the host.

    device    weights + gradients + optimizer, by ZeRO stage, + activations at the peak + the loss's chunk of logits
              + buckets by `plan_buckets` + weights gathered by stage 3 + context and fragmentation
    host      offloaded state, and the copy that a checkpoint is written from

Tested against the live tensors of real ranks (`tests/integration/test_plan_memory.py`).
"""

from dataclasses import dataclass, fields

from pretrain.plan.cluster import Cluster
from pretrain.plan.memory import bytes_per_parameter, plan_buckets, state_bytes
from pretrain.plan.work import ParallelLayout, TrainingTask, kept_by

CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**26}
"""Scores of a chunk of the loss, as in `objective/loss.py`."""

_MAX_LIVE = 1_000_000_000
"""DeepSpeed's default of `stage3_max_live_parameters`: those that stage 3 may leave gathered."""

_ALL_REDUCED = 500_000_000
"""Gradients that DeepSpeed copies side by side to reduce them at stage 0 (`MEMORY_OPT_ALLREDUCE_SIZE`)."""

_CONTEXT_BYTES = 600 * 2**20
_NCCL_BYTES = 500 * 2**20
_FRAGMENTED = 0.03
"""CUDA context of a process, channels of NCCL, and the share that the allocator cannot use."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Peak bytes on the device of one rank."""

    weights: int  # working weights
    gradients: int  # gradients between micro-batches
    optimizer: int  # master weights and moments
    gathered: int  # weights that stage 3 has gathered
    activations: int  # activations of a micro-batch, and of the block that is computed again
    loss: int  # logits of a chunk, and the sum of the head's gradient
    buckets: int  # communication buckets
    overhead: int  # context, NCCL, fragmentation

    @property
    def state(self) -> int:
        """Weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


def bucket_bytes(parameters: int, trained: int, layout: ParallelLayout, world_size: int) -> int:
    """Returns bytes of communication buckets of a model with `trained` trained values."""
    engine, size = layout.engine, 4 if layout.engine.precision == "fp32" else 2
    if world_size == 1 and engine.kind != "deepspeed":
        return 0
    if engine.kind == "ddp":
        return 4 * trained  # DDP's buckets are a copy of the gradients
    if not engine.zero_stage:
        return size * min(trained, _ALL_REDUCED) if world_size > 1 else 0
    buckets = plan_buckets(parameters, engine.zero_stage)
    return size * (buckets.reduce_bucket_size + max(buckets.allgather_bucket_size, buckets.stage3_prefetch_bucket_size))


def loss_bytes(task: TrainingTask, layout: ParallelLayout, device: str) -> int:
    """Returns the working memory of the chunked loss: its logits, their gradient, and sums in fp32."""
    model = task.model
    if model.head.kind != "lm":
        return 0
    size, rows = 4 if layout.engine.precision == "fp32" else 2, model.padded_vocab_size
    positions = round(layout.micro * task.lengths.target * task.head_share)
    logits = min(CHUNK_LOGITS[device], positions * rows)
    in_16_bits = 2 * size if size == 2 else 0  # scores before, and gradients after the fp32 pass
    sums = rows * model.last_stack.width * (4 + size if size == 2 and task.trains_head else 0)
    return logits * (4 + in_16_bits) + sums


def rank_memory(task: TrainingTask, layout: ParallelLayout, cluster: Cluster) -> RankMemory:
    """Counts the memory of one rank."""
    engine, values = layout.engine, task.values
    parameters = values.weights - (task.trained.adapter_values if task.trained else 0)
    each = bytes_per_parameter(
        engine.zero_stage,
        engine.precision if engine.kind == "deepspeed" else "fp32",
        cluster.size,
        state_bytes(task.optimizer, values) / values.trained,
        offload_optimizer=engine.offload_optimizer != "none",
        offload_params=engine.offload_params != "none",
    )
    _, peak = kept_by(task, engine, layout.micro, cluster.device)
    size = 4 if engine.precision == "fp32" else 2
    sharded = engine.zero_stage == 3 and cluster.size > 1
    found = RankMemory(
        weights=round(each.weights * values.weights),
        gradients=round(each.gradients * values.trained),
        optimizer=round(each.optimizer * values.trained),
        gathered=size * min(values.weights, _MAX_LIVE) if sharded or engine.offload_params != "none" else 0,
        activations=peak,
        loss=loss_bytes(task, layout, cluster.device),
        buckets=bucket_bytes(parameters, values.trained, layout, cluster.size),
        overhead=0,
    )
    overhead = _fixed_bytes(cluster) + round(_FRAGMENTED * found.total)
    return RankMemory(**{f.name: getattr(found, f.name) for f in fields(found)} | {"overhead": overhead})


def _fixed_bytes(cluster: Cluster) -> int:
    """Returns bytes of a process without tensors: measured, or estimated for a GPU and left out for a CPU."""
    measured = cluster.calibration
    context = 0 if cluster.device == "cpu" else _CONTEXT_BYTES
    group = 0 if cluster.device == "cpu" else _NCCL_BYTES
    if measured is not None:
        context = measured.overhead_bytes
        group = group if measured.group_bytes is None else measured.group_bytes
    return context + (group if cluster.size > 1 else 0)


def host_bytes(task: TrainingTask, layout: ParallelLayout, cluster: Cluster) -> int:
    """Returns bytes of a rank on its host: offloaded state, and the copy that a checkpoint is written from."""
    engine, values = layout.engine, task.values
    state = state_bytes(task.optimizer, values)
    copied = (4 * values.saved + state) // cluster.size
    offloaded = 0
    if engine.offload_optimizer != "none":
        offloaded += (state + 8 * values.trained) // cluster.size
    if engine.offload_params != "none":
        offloaded += values.weights * (4 if engine.precision == "fp32" else 2) // cluster.size
    return copied + offloaded


def memory_limit(cluster: Cluster) -> int:
    """Returns the memory limit of a rank; on CPUs the ranks of a machine share its memory."""
    if cluster.calibration is None:
        return int(cluster.gpu.memory_gib * 2**30)
    return cluster.calibration.memory_bytes // (cluster.per_node if cluster.device == "cpu" else 1)


def largest_micro(task: TrainingTask, layout: ParallelLayout, cluster: Cluster, most: int) -> int:
    """Returns the largest micro-batch that fits a rank, at most `most`; 0: none fits."""
    low, high, limit = 0, most, memory_limit(cluster)
    while low < high:
        middle = (low + high + 1) // 2
        fits = rank_memory(task, ParallelLayout(layout.engine, middle, 1), cluster).total <= limit
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
