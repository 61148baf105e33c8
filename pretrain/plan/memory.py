"""The memory of one rank, on its device and on the host.

    device    weights + gradients + optimizer, by ZeRO stage, + activations at the peak:
              with the loss's chunk of logits, or in a block's backward pass
              + buckets by `plan_buckets` + weights gathered by stage 3
              + context and fragmentation
    host      offloaded state and activations, and copies: of a save, and for recoveries

Tested against the live tensors of real ranks (`tests/integration/test_plan_memory.py`).
"""

from bisect import bisect_right
from dataclasses import dataclass, fields, replace
from typing import Literal

from pretrain.config.engine import EngineConfig
from pretrain.config.model.parts import counts_of
from pretrain.kinds.optimizer import MatrixState
from pretrain.kinds.optimizers import OPTIMIZERS
from pretrain.plan.activations import ActivationBytes, activation_bytes
from pretrain.plan.cluster import Cluster
from pretrain.plan.gathers import GatherPlan, plan_gathers
from pretrain.plan.task import ParallelLayout, TrainingTask
from pretrain.plan.trained import Values

_MIN_BUCKET = 2**20
_MAX_BUCKET = 50_000_000
_MAX_PERSISTENT = 100_000
# DeepSpeed wants all-gather buckets to be a multiple of its alignment, a small power of two.
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class BucketSizes:
    """DeepSpeed's buffer sizes in elements, by their names in its `zero_optimization` section."""

    reduce_bucket_size: int  # gradients reduced at once
    allgather_bucket_size: int  # weights gathered at once after a step (stages 1 and 2)
    stage3_prefetch_bucket_size: int  # weights gathered ahead of use. 0 below stage 3
    stage3_param_persistence_threshold: int  # smaller tensors are kept whole. 0 below stage 3


def plan_buckets(num_parameters: int, zero_stage: int) -> BucketSizes:
    """Sizes the buckets from the model, instead of 5e8 elements for any model.

    Each is 5% of the parameters, at least 2^20 elements (with 2^18 a 5M model on gloo spent an
    eighth of its step on latency) and at most 5e7. A parameter larger than a bucket is reduced by
    itself. Tensors under a ten-thousandth of the model (norms and biases), at most 1e5 elements,
    persist: all of them together are a per cent or two of it.
    """
    share = num_parameters // 20 // _ALIGNMENT * _ALIGNMENT
    bucket = max(_MIN_BUCKET, min(_MAX_BUCKET // _ALIGNMENT * _ALIGNMENT, share))
    if zero_stage < 3:
        return BucketSizes(bucket, bucket, 0, 0)
    return BucketSizes(bucket, bucket, bucket, min(_MAX_PERSISTENT, num_parameters // 10_000))


_MIN_SHARE = 2**18
"""Values of a message to one rank from which on bytes count more than latency; not measured on GPUs."""


def reduces_to_owners(num_parameters: int, world_size: int) -> bool:
    """Returns whether ZeRO 1 and 2 reduce a rank's share of the gradients to that rank alone.

    Otherwise all of them are all-reduced, which is DeepSpeed's default
    (`use_multi_rank_bucket_allreduce`): twice the bytes, in fewer messages.
    """
    return num_parameters // world_size >= _MIN_SHARE


def state_bytes(kind: str, values: Values) -> int:
    """Returns the bytes of all state of an optimizer; not of vectors beside matrices, which are small."""
    optimizer = OPTIMIZERS[kind]
    of_others = len(optimizer.moments)
    matrices = MatrixState(values=of_others)
    if optimizer.matrices is not None:
        matrices = optimizer.matrices(optimizer.section and optimizer.section())
    numbers = matrices.values * values.hidden + of_others * (values.trained - values.hidden)
    return 4 * (numbers + matrices.squares * values.sides)


def kept_bytes(task: TrainingTask) -> int:
    """Returns the bytes of optimizer state and of the average of the weights, over all ranks."""
    average = 4 * task.values.trained if task.averages else 0
    return state_bytes(task.optimizer, task.values) + average


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
    gradient_bytes: int | None = None,
) -> BytesPerParameter:
    """Returns the state of a rank's device per parameter (Rajbhandari et al. 2020, 3 and figure 1).

    Replicated, fp32 has 4 + 4 + 8 bytes under AdamW (two moments), 16 bits 2 + 2 + 12 (an fp32
    master weight and two moments). Stage 1 divides the optimizer's part by the number of ranks,
    stage 2 the gradients' too, stage 3 the weights' too. From stage 1 on DeepSpeed steps a copy of
    a rank's share, in fp32 4 bytes more than in the paper. Adafactor's rows and columns are too
    few to count.

    DDP and one process are stage 0; `state` is the optimizer state in bytes, 8 under AdamW. Master
    weights and optimizer state, or working weights, may be in host memory. `gradient_bytes`: of one
    that is kept between micro-batches; None: as of a working weight.
    """
    working = 4 if precision == "fp32" else 2
    master = 0 if precision == "fp32" and not zero_stage else 4
    on_device = 0.0 if offload_optimizer else master + state
    return BytesPerParameter(
        weights=0.0 if offload_params else working / (world_size if zero_stage >= 3 else 1),
        gradients=(gradient_bytes or working) / (world_size if zero_stage >= 2 else 1),
        optimizer=on_device / (world_size if zero_stage >= 1 else 1),
    )


_ALL_REDUCED = 500_000_000
"""Gradients that DeepSpeed copies and reduces at once at stage 0 (`MEMORY_OPT_ALLREDUCE_SIZE`)."""

_SUB_GROUP = 1_000_000_000
"""Values of a rank that stage 3 updates at once (`sub_group_size`, DeepSpeed's default)."""

_CONTEXT_BYTES = 600 * 2**20
_NCCL_BYTES = 500 * 2**20
_FRAGMENTED = 0.03
"""CUDA context of a process, channels of NCCL, and the share that the allocator cannot use."""


NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a value in 4 bits: its code, a scale of 64 values in 8 bits, and one of 256 scales in fp32."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Peak bytes on the device of one rank."""

    weights: int  # working weights, and a node's copy of them (`engine.zero_hpz`)
    gradients: int  # gradients between micro-batches, and fp32 copies in the update at stage 3
    optimizer: int  # master weights, moments, and the average of the weights
    gathered: int  # whole weights at stage 3, and the whole gradients that are on their way
    activations: int  # activations of a micro-batch, and of the block that is computed again
    loss: int  # logits of a chunk, and the sum of the head's gradient, where the backward pass needs less
    buckets: int  # communication buckets
    overhead: int = 0  # context, NCCL, fragmentation

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


def rank_memory(task: TrainingTask, layout: ParallelLayout, cluster: Cluster) -> RankMemory:
    """Counts the memory of one rank."""
    layout = layout.on(cluster.size)
    return _count_memory(task, layout, cluster, loss_logits(task, layout, cluster))


def _count_memory(
    task: TrainingTask, layout: ParallelLayout, cluster: Cluster, num_logits: int
) -> RankMemory:  # fmt: skip
    engine = layout.engine
    values = task.values
    each = bytes_per_parameter(
        engine.zero_stage,
        "fp32" if engine.autocasts else engine.precision,
        cluster.size,
        kept_bytes(task) / values.trained,
        offload_optimizer=engine.offload_optimizer != "none",
        offload_params=engine.offload_params != "none",
        gradient_bytes=engine.gradient_bytes,
    )
    copied = engine.compute_bytes / engine.zero_hpz if engine.zero_hpz > 1 else 0
    activations = activation_bytes(task, engine, layout.micro, cluster.device)
    logits = _loss_bytes(task, layout, cluster, num_logits)
    # A stage shards what it shards over all ranks, what some share too: a part of a part.
    stage, elsewhere = engine.zero_stage, task.elsewhere
    held = values.weights - (elsewhere if stage < 3 else 0)
    memory = RankMemory(
        weights=round((each.weights + copied) * (held - values.quantized) + NF4_BYTES * values.quantized),
        gradients=round(each.gradients * (values.trained - (elsewhere if stage < 2 else 0))),
        optimizer=round(each.optimizer * (values.trained - (elsewhere if stage < 1 else 0))),
        gathered=0,
        activations=activations.peak,
        # Gone when blocks run backward.
        loss=max(0, logits - activations.recomputed - activations.gradient),
        buckets=_bucket_bytes(task, layout, cluster.size),
    )
    if engine.zero_stage == 3 and (cluster.size > 1 or engine.offload_params != "none"):
        phases = _phases(task, engine, cluster, replace(memory, loss=logits), activations)
        memory = max(phases, key=lambda phase: phase.total)
    elif engine.has_masters or engine.zero_stage in (1, 2):
        memory = max(memory, _in_update(task, engine, cluster, memory), key=lambda phase: phase.total)
    overhead = _fixed_bytes(cluster) + round(_FRAGMENTED * memory.total)
    return replace(memory, overhead=overhead)


def gathers_of(task: TrainingTask, engine: EngineConfig, device: str, ranks: int) -> GatherPlan:
    """Returns what stage 3 gathers in a micro-batch, with the buckets of the engine."""
    buckets = plan_buckets(_sized_by(task), 3)
    return plan_gathers(
        task,
        engine,
        device,
        ranks,
        ahead=buckets.stage3_prefetch_bucket_size,
        bucket=buckets.reduce_bucket_size,
        small=buckets.stage3_param_persistence_threshold,
    )


def _phases(
    task: TrainingTask,
    engine: EngineConfig,
    cluster: Cluster,
    found: RankMemory,
    kept: ActivationBytes,
) -> list[RankMemory]:
    """Returns the peaks of stage 3: in and after the loss, in and after the backward pass of blocks, in the update.

    `found` has the whole working memory of the loss. Whole weights and gradients come and go, and of
    a large model they are more than all the rest; that of the head is reduced before the blocks' are
    made.
    """
    size = engine.compute_bytes
    plan = gathers_of(task, engine, cluster.device, cluster.size)
    whole = {phase: size * (values + plan.small) for phase, values in plan.whole.items()}
    in_loss = replace(found, gathered=whole["loss"], activations=kept.kept)
    at_turn = replace(found, gathered=whole["turn"], activations=kept.kept - kept.loss, loss=0)
    in_blocks = replace(found, gathered=whole["blocks"], activations=kept.peak - kept.loss, loss=0)
    at_end = replace(found, gathered=whole["end"], activations=kept.ends, loss=0)
    return [in_loss, at_turn, in_blocks, at_end, _in_update(task, engine, cluster, found)]


def _in_update(
    task: TrainingTask, engine: EngineConfig, cluster: Cluster, found: RankMemory
) -> RankMemory:  # fmt: skip
    """Returns the memory in the update: activations are gone, and gradients of other shares."""
    size, trained, made = engine.gradient_bytes, task.values.trained, 0
    if engine.has_masters:
        # A flat copy: for a fused update in 16 bits, else in fp32.
        made = (size if engine.fuses_update(cluster.device) else 4) * trained
    elif engine.offload_optimizer == "none":
        made = update_bytes(engine.zero_stage, trained, size, cluster.size)
    share = trained // (1 if engine.has_masters else cluster.size)
    gradients = min(found.gradients, size * share) + made
    return replace(found, gradients=gradients, activations=0, loss=0)


def update_bytes(zero_stage: int, trained: int, gradient_bytes: int, world_size: int) -> int:
    """Returns the bytes of gradients that an update makes beside those that are kept.

    They are a rank's share of `trained` values in fp32, at stage 3 at most a group of DeepSpeed's at
    a time, and before they are converted from 16 bits, where kept ones are, once more in these.
    """
    copies = 4 + (gradient_bytes if gradient_bytes < 4 else 0)
    share = trained // world_size
    return copies * (min(_SUB_GROUP, share) if zero_stage == 3 else share)


def chunk_logits(gpu_bytes: int) -> int:
    """Returns the number of logits that the loss holds at once; they determine the order of summation.

    More on a GPU: adding to the gradient of the head's weight is bound by memory, and small chunks
    by kernel launches.

    Args:
        gpu_bytes: Memory of the GPU; 0: a CPU.
    """
    if not gpu_bytes:
        return 2**24  # 64 MiB in fp32
    return 2**28 if gpu_bytes >= 60 * 2**30 else 2**26


def loss_logits(task: TrainingTask, layout: ParallelLayout, cluster: Cluster) -> int:
    """Returns the number of logits that the loss holds at once; 0: it scores no words.

    With `engine.loss_chunk=whole` it is all of them, where a rank's memory suffices.
    """
    scored = task.generator or task
    if not scored.model.head.record.scores_words:
        return 0
    positions = round(layout.micro * task.columns.target * scored.head_share)
    whole = positions * scored.model.padded_vocab_size
    if layout.engine.loss_chunk == "whole":
        needed = _count_memory(task, layout.on(cluster.size), cluster, whole)
        if needed.total <= memory_limit(cluster):
            return whole
    gpu_bytes = memory_limit(cluster) if cluster.device == "cuda" else 0
    return min(chunk_logits(gpu_bytes), whole)


def _loss_bytes(task: TrainingTask, layout: ParallelLayout, cluster: Cluster, logits: int) -> int:
    """Returns the working memory of the loss: a chunk of logits, its gradient, and sums in fp32."""
    if task.generator is not None:
        task = task.generator
    if not task.model.head.record.scores_words:
        return 0
    size = layout.engine.compute_bytes
    rows = task.model.padded_vocab_size
    if size == 4:
        return 4 * logits
    # In 16 bits: scores before, and gradients after the fp32 pass, which a compiled loss does not store.
    # Sums in fp32; rounded, they are among the activations.
    sums = rows // task.tensor * counts_of(task.model).width * (4 if task.trains_head else 0)
    return logits * ((0 if layout.engine.compiles(cluster.device) else 4) + 2 * size) + sums


def _sized_by(task: TrainingTask) -> int:
    return task.values.weights - (task.trained.adapter_values if task.trained else 0)


def _bucket_bytes(task: TrainingTask, layout: ParallelLayout, world_size: int) -> int:
    engine = layout.engine
    trained = task.values.trained
    if world_size == 1 and engine.is_replicated:
        return 0
    if engine.kind == "ddp":
        return engine.gradient_bytes * trained  # DDP's buckets are a copy of the gradients
    if not engine.zero_stage:
        sent = trained - task.elsewhere
        return engine.compute_bytes * min(sent, _ALL_REDUCED) if world_size > 1 else 0
    buckets = plan_buckets(_sized_by(task), engine.zero_stage)
    gathered = buckets.allgather_bucket_size if engine.zero_stage < 3 else 0
    num_bytes = engine.compute_bytes * (buckets.reduce_bucket_size + gathered)
    if engine.gradient_bytes > engine.compute_bytes:
        num_bytes += engine.gradient_bytes * buckets.reduce_bucket_size  # the copy that is sent
    return num_bytes


def _fixed_bytes(cluster: Cluster) -> int:
    """Returns bytes of a process without tensors: measured, else estimated, 0 for a CPU."""
    measured = cluster.calibration
    context, group = (0, 0) if cluster.device == "cpu" else (_CONTEXT_BYTES, _NCCL_BYTES)
    if measured is not None:
        context = measured.overhead_bytes
        group = group if measured.group_bytes is None else measured.group_bytes
    return context + (group if cluster.size > 1 else 0)


def host_bytes(task: TrainingTask, layout: ParallelLayout, cluster: Cluster) -> int:
    """Returns bytes of a rank on its host: what is offloaded, and copies: of a save, for recoveries."""
    engine = layout.engine
    values = task.values
    state = kept_bytes(task)
    num_bytes = (4 * values.saved + state) // cluster.size * (1 + task.copies)
    if engine.offload_optimizer != "none":
        num_bytes += (state + 8 * values.trained) // cluster.size
    if engine.offload_params != "none":
        num_bytes += values.weights * engine.compute_bytes // cluster.size
    return num_bytes + activation_bytes(task, engine, layout.micro, cluster.device).on_host


def memory_limit(cluster: Cluster) -> int:
    """Returns the memory limit of a rank; on CPUs the ranks of a machine share its memory."""
    if cluster.calibration is None:
        return int(cluster.gpu.memory_gib * 2**30)
    return cluster.calibration.memory_bytes // (cluster.per_node if cluster.device == "cpu" else 1)


def largest_micro(task: TrainingTask, engine: EngineConfig, cluster: Cluster, most: int) -> int:
    """Returns the largest micro-batch that fits a rank, at most `most`; 0: none fits."""
    limit = memory_limit(cluster)

    def needed(micro: int) -> int:
        return rank_memory(task, ParallelLayout(engine, micro, 1), cluster).total

    return bisect_right(range(1, most + 1), limit, key=needed)
