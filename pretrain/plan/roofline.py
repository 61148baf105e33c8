"""The time of a step by a roofline: work over the reached share of each peak, by kind of kernel.

    products        FLOPs over a share of the peak, which grows with their width; of attention by the share
                    of its kernel, which grows with the keys; in FP8 as `fp8.py` has it
    elementwise     bytes over a share of the memory's bandwidth: norms, activations, softmax
    optimizer       the same, by engine: gradients to buckets, norm, clip, update (`launches.py`)
    network         bytes by ZeRO stage over the slower of links and network, less the hidden ones;
                    exchanges of ranks that share rows, and of those that share experts

    host            launches by the host's time for one, where that is longer than all of it

The shares are those of `gpus.py`. The bound is the part that takes longest.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from pretrain.config.engine import EngineConfig
from pretrain.config.model.parts import counts_of
from pretrain.plan.activations import activation_bytes, exchanged_bytes
from pretrain.plan.cluster import Cluster
from pretrain.plan.flops import RowFlops
from pretrain.plan.fp8 import fp8_products, time_ratio
from pretrain.plan.gpus import Constants
from pretrain.plan.launches import attention_kernel, count_launches, update_traffic
from pretrain.plan.memory import bytes_per_parameter, gathers_of, kept_bytes, reduces_to_owners
from pretrain.plan.params import count_active, count_parameters, count_parts
from pretrain.plan.task import ParallelLayout, TrainingTask


def overlaps(engine: EngineConfig, device: str) -> bool:
    """Returns whether communication overlaps computation, as `deepspeed_config` sets it."""
    # At stages 1 and 2 DeepSpeed would reduce after every micro-batch, from streams that race with
    # the gradients (deepspeedai/DeepSpeed#5545 and #8061).
    return engine.is_replicated or (engine.zero_stage == 3 and device == "cuda")


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one rank in a step; of a row that ranks share, on its part."""

    whole: RowFlops  # forward and backward pass of a row
    forward: RowFlops  # forward pass of a row
    micro: int  # rows of a micro-batch
    recompute: float  # share of the forward pass that is run again
    width: int  # model width, D
    kept_bytes: float  # activations of a micro-batch without checkpointing, for elementwise traffic
    logits: float  # scores that the loss reads in a micro-batch
    parameters: float  # weights of the whole model
    trained: float  # weights with a gradient
    weight_bytes: int  # bytes of a working weight
    gradient_bytes: int  # bytes of a gradient on the wire
    gathered: float  # weights that stage 3 gathers for a micro-batch, each time that it does
    small: float  # weights that it gathers once a step
    layers: int  # blocks, as many as there are gathers
    update_bytes: float  # bytes that gradients and their update move in a step, on this rank
    launches: float  # kernels that the host launches in a step
    keys: int  # keys of a row, which attention reads
    offload_bytes: float  # bytes of state and weights between host and device in a step
    accumulation: int  # micro-batches of a step
    kernel: str = "flash"  # attention kernel: `flash` or `cudnn`
    compiled: bool = True  # true: blocks are compiled
    fp32: bool = False  # true: products are in fp32
    fp8_ratio: float = 1.0  # time of the blocks' products over that in bf16
    zero_stage: int = 0  # ZeRO stage; 0 also for DDP
    zero_hpz: int = 1  # ranks of a node that have all weights at stage 3; 1: of all nodes
    overlaps: bool = False  # true: communication overlaps computation
    saved_bytes: int = 0  # activations of a micro-batch that go to the host and back
    sequence: int = 1  # ranks that share a row
    exchanged: int = 0  # bytes of a micro-batch that these exchange, for attention
    experts: int = 1  # ranks that share the experts of a layer
    routed: int = 0  # bytes of a micro-batch that these exchange
    elsewhere: int = 0  # weights that ranks share, and that others reduce and gather
    tensor: int = 1  # ranks that share the matrices of all layers
    collected: int = 0  # bytes of a micro-batch that these gather and sum

    @property
    def model_flops(self) -> float:
        """Useful work of a step on this rank."""
        return self.accumulation * self.micro * self.whole.total


def recompute_share(task: TrainingTask, engine: EngineConfig) -> float:
    """Returns the share of the blocks' forward pass that is run again: products, under `full` and in tiles."""
    stacks = counts_of(task.model).stacks
    if not stacks:
        return 0.0
    computed = 0.0
    if engine.activation_checkpointing == "full":
        layers = [one.layers for one in stacks]
        again = [-(-count // engine.activation_checkpointing_every) for count in layers]
        computed = sum(again) / sum(layers)
    if engine.feedforward_tiles > 1:
        parts = count_parts(task.model)
        forward = task.flops.forward
        active = parts["feedforward"] - count_parameters(task.model) + count_active(task.model)
        share = active / (active + parts["attention"])
        computed += share * forward.projections / (forward.projections + forward.attention)
    return computed


def routed_bytes(task: TrainingTask, engine: EngineConfig, micro: int) -> int:
    """Returns bytes that a rank exchanges with those that share experts, its own part included."""
    stacks = counts_of(task.model).stacks
    layers = [number for number in stacks[-1].numbers if stacks[-1].has_experts(number)] if stacks else []
    if not layers or task.experts == 1:
        return 0
    again = engine.activation_checkpointing != "none"
    tiles = engine.feedforward_tiles
    every = engine.activation_checkpointing_every
    repeated = sum(number % every == 0 for number in layers) if again else 0
    forward: float = len(layers) + repeated
    if tiles > 1:
        # Each tile once more; of a block that is computed again, the last one is not needed there.
        forward += len(layers) - repeated / tiles
    # To the experts and back, in each pass; and counts of rows, which have no gradient.
    rows, counted = stacks[-1].routed(micro * task.columns.target, engine.compute_bytes)
    return round(rows * (forward + len(layers)) + counted * tiles * forward)


_STATISTICS = 20
"""Bytes of the values of a token that ranks gather for the loss (`objective/chunk_loss.py`)."""


def collected_bytes(task: TrainingTask, engine: EngineConfig, micro: int) -> int:
    """Returns bytes of columns that ranks which share matrices gather, and of sums that they cut.

    Both are those of all ranks, this one's part included.
    """
    if task.tensor == 1:
        return 0
    size, ids = engine.compute_bytes, 8
    target = micro * task.columns.target * task.tensor
    source = micro * (task.columns.source or 0) * task.tensor
    total = 0
    counts = counts_of(task.model)
    for one in counts.stacks:
        tokens = target if one is counts.stacks[-1] else source or target
        again = engine.activation_checkpointing != "none"
        repeated = -(-one.layers // engine.activation_checkpointing_every) if again else 0
        total += one.collected(tokens, source if one.reads_encoder else 0, repeated, size)
    if task.model.head.record.scores_words:
        chosen = round(target * task.head_share)
        total += chosen * (ids + _STATISTICS * task.tensor + 2 * size * counts.head_width)
    return total


def plan_work(task: TrainingTask, layout: ParallelLayout, world_size: int, device: str = "cuda") -> Work:
    """Counts the work of a rank."""
    counts = counts_of(task.model)
    values = task.values
    engine = layout.engine.on(world_size)
    plain = engine.model_copy(
        update={"activation_checkpointing": "none", "offload_activations": "none", "feedforward_tiles": 1}
    )
    on_host = engine.offload_optimizer != "none"
    each = kept_bytes(task) / values.trained
    zero = (engine.zero_stage, engine.precision, world_size, each)
    offload = 0.0
    if on_host:
        # Gradients down, weights up; and the update, at about that speed, in the host's memory.
        updated = 2 * bytes_per_parameter(*zero).optimizer * values.trained
        offload += 2 * engine.compute_bytes * values.trained / world_size + updated
    if engine.offload_params != "none":
        offload += 2 * engine.compute_bytes * values.weights / world_size * layout.accumulation
    scored = task.generator or task
    rows = scored.model.padded_vocab_size if scored.model.head.record.scores_words else 0
    gathers = gathers_of(task, engine, device, world_size)
    adapters = task.trained.adapter_values if task.trained else 0
    recompute = recompute_share(task, engine)
    return Work(
        whole=task.flops.whole.part(task.row_ranks),
        forward=task.flops.forward.part(task.row_ranks),
        micro=layout.micro,
        recompute=recompute,
        width=counts.width,
        kept_bytes=activation_bytes(task, plain, layout.micro).kept,
        logits=layout.micro * task.columns.target * scored.head_share * rows,
        parameters=values.weights,
        trained=values.trained,
        weight_bytes=engine.compute_bytes,
        gradient_bytes=engine.gradient_bytes,
        gathered=gathers.gathered + 2 * adapters,
        small=gathers.small,
        layers=counts.num_blocks,
        update_bytes=update_traffic(task, layout.on(world_size), world_size, device),
        launches=count_launches(task, layout, recompute, device),
        keys=task.lengths.target,
        kernel=attention_kernel(task, engine),
        compiled=engine.compiles(device),
        offload_bytes=offload,
        accumulation=layout.accumulation,
        fp32=engine.precision == "fp32",
        zero_stage=engine.zero_stage,
        zero_hpz=engine.zero_hpz,
        overlaps=overlaps(engine, device),
        saved_bytes=activation_bytes(task, engine, layout.micro, device).on_host,
        sequence=task.sequence,
        exchanged=exchanged_bytes(task, engine, layout.micro),
        experts=task.experts,
        routed=routed_bytes(task, engine, layout.micro),
        # With as many ranks as share weights, each is alone with its own.
        elsewhere=task.elsewhere if world_size > task.parts else task.shared,
        tensor=task.tensor,
        collected=collected_bytes(task, engine, layout.micro),
    )


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step by part; the sum is the step."""

    projections: float
    attention: float
    elementwise: float
    optimizer: float
    network: float
    offload: float
    host: float = 0.0  # time in which the device waits for launches

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.memory + self.network + self.offload + self.host

    @property
    def compute(self) -> float:
        """Seconds limited by arithmetic."""
        return self.projections + self.attention

    @property
    def memory(self) -> float:
        """Seconds limited by memory bandwidth."""
        return self.elementwise + self.optimizer

    @property
    def bound(self) -> str:
        """Longest part: compute, memory, network, offload; or host, where the device waits for most of a step."""
        names = ("compute", "memory", "network", "offload", "host")
        return max(names, key=lambda name: float(getattr(self, name)))


class Traffic(NamedTuple):
    """Bytes of a rank's collectives in a step, each as often as it passes a link of a ring.

    Attributes:
        often: Among all ranks, with each micro-batch.
        once: Among all ranks, once a step.
        inside: Within the ranks of `engine.zero_hpz`, with each micro-batch.
    """

    often: float
    once: float
    inside: float = 0.0

    def total(self, accumulation: int) -> float:
        """Returns the bytes of a step of so many micro-batches."""
        return accumulation * (self.often + self.inside) + self.once


def wire_bytes(work: Work, world_size: int) -> Traffic:
    """Returns the bytes over a rank's link in a step.

    An all-reduce of gradients costs twice their size, a reduction to their owners once
    (Rajbhandari et al. 2020, 7), and so does the gathering of the new weights. DeepSpeed's stage 2
    reduces after every micro-batch. Stage 3 gathers weights for each pass (`gathers.py`); with
    `engine.zero_hpz` all gathers of a weight but the first of a step stay within its ranks.
    """
    if world_size == 1:
        return Traffic(0.0, 0.0)
    gradients = (work.trained - work.elsewhere) * work.gradient_bytes
    if work.zero_stage == 0:
        return Traffic(0.0, 2 * gradients)
    if work.zero_stage == 3:
        gathered = work.gathered * work.weight_bytes
        once = work.small * work.weight_bytes
        if work.zero_hpz == 1:
            return Traffic(gathered + gradients, once)
        first = (work.parameters - work.elsewhere) * work.weight_bytes - once
        return Traffic(gradients, once + first, gathered - first / work.accumulation)
    reduced = gradients if reduces_to_owners(int(work.trained), world_size) else 2 * gradients
    gathered = (work.trained - work.elsewhere) * work.weight_bytes
    return Traffic(reduced, gathered) if work.zero_stage == 2 else Traffic(0.0, reduced + gathered)


def link_seconds(num_bytes: float, cluster: Cluster, constants: Constants) -> float:
    """Returns the seconds of rings over all ranks, one a network card: a node's cards add up."""
    links = cluster.gpu.link_bytes_s * constants.link_share
    inside = num_bytes * (cluster.size - 1) / cluster.size / links
    if cluster.nodes == 1:
        return inside
    cards = cluster.per_node * cluster.gpu.network_bytes_s * constants.network_share
    return max(inside, num_bytes * (cluster.nodes - 1) / cluster.nodes / cards)


def exchange_seconds(num_bytes: int, ranks: int, cluster: Cluster, constants: Constants) -> float:
    """Returns the seconds of exchanges among consecutive ranks, given the bytes of one."""
    links = cluster.gpu.link_bytes_s * constants.link_share
    network = cluster.gpu.network_bytes_s * constants.network_share
    sent = num_bytes * (ranks - 1) / ranks
    outside = num_bytes * max(0.0, 1 - cluster.per_node / ranks)  # to other nodes
    return max(sent / links, outside / network)


def time_step(work: Work, cluster: Cluster, constants: Constants | None = None) -> StepTime:
    """Predicts a step; `constants=None` takes the cluster's."""
    constants = constants or cluster.constants
    gpu = cluster.gpu
    shares = constants.shares[gpu.generation]
    peak = gpu.flops_fp32 if work.fp32 else gpu.flops
    again = 1 + work.recompute / 3  # of what is moved, a third is the forward pass's
    products = shares.of_peak(gpu, work.width)
    flops = work.micro * work.whole.projections + work.recompute * (work.micro * work.forward.projections)
    projections = (work.fp8_ratio * flops + work.micro * work.whole.head) / (peak * products)
    flops = work.micro * work.whole.attention + work.recompute * (work.micro * work.forward.attention)
    attention = flops / (peak * shares.attention(work.kernel, work.keys))
    bandwidth = gpu.memory_bytes_s * constants.memory_share
    passes = shares.compiled_passes if work.compiled else shares.eager_passes
    moved = passes * work.kept_bytes * again + constants.logit_bytes * work.logits
    elementwise = moved / bandwidth
    micro = projections + attention + elementwise
    sent = wire_bytes(work, cluster.size)
    groups = replace(cluster, nodes=max(1, work.zero_hpz // cluster.per_node))
    gathers = 3 * work.layers if work.zero_stage == 3 and cluster.size > 1 else 0
    latency = gathers * (constants.latency_s + constants.latency_node_s * cluster.nodes)
    wire = link_seconds(sent.often, cluster, constants) + latency
    wire += link_seconds(sent.inside, groups, constants)
    last = link_seconds(sent.once, cluster, constants)
    if work.overlaps:
        wire = max(constants.never_hidden * wire, wire - constants.hides * micro)
        last = max(constants.never_hidden * last, last - constants.hides * micro * 2 / 3)
    # Activations are copied during the passes, a third and two thirds of a micro-batch.
    saved = work.saved_bytes / constants.host_bytes_s
    exposed = max(0.0, saved - micro / 3) + max(0.0, saved - micro * 2 / 3)
    count = work.accumulation
    exchanges = exchange_seconds(work.exchanged, work.sequence, cluster, constants)
    exchanges += exchange_seconds(work.routed, work.experts, cluster, constants)
    exchanges += exchange_seconds(work.collected, work.tensor, cluster, constants)
    busy = StepTime(
        projections=count * projections,
        attention=count * attention,
        elementwise=count * elementwise,
        optimizer=work.update_bytes / (bandwidth * constants.update_share),
        network=count * (wire + exchanges) + last,
        offload=work.offload_bytes / constants.host_bytes_s + count * exposed,
    )
    return replace(busy, host=max(0.0, work.launches * constants.launch_s - busy.total))


LOADER_TOKENS_S = 8e7
"""Tokens that a rank's loader assembles a second with one thread (benchmarks/results.md)."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Speed of a run."""

    step_s: float  # seconds of a step
    tokens_s: float  # tokens that the model reads a second, over all ranks
    mfu: float  # model FLOPs utilization, 0 to 1
    bound: str  # bottleneck: compute, memory, network, offload or data; `given`: not predicted
    parts: StepTime | None = None  # seconds of a step by part. None: not predicted


def predict_rate(
    task: TrainingTask, layout: ParallelLayout, cluster: Cluster, *, mfu: float = 0.0, tokens_s: float = 0.0
) -> Rate:
    """Predicts the speed of a layout; or returns it at a given MFU, or number of tokens a second."""
    work = plan_work(task, layout, cluster.size, cluster.device)
    if layout.engine.has_fp8:
        products = fp8_products(task, layout.micro, layout.engine.fp8, cluster)
        work = replace(work, fp8_ratio=time_ratio(products))
    tokens = cluster.size // task.row_ranks * layout.micro * layout.accumulation * task.tokens
    # MFU is a share of the dense bf16 peak, also in fp32, as `tracking` counts it.
    flops = work.model_flops * cluster.size
    peak = cluster.size * cluster.gpu.flops
    if mfu or tokens_s:
        step_s = tokens / tokens_s if tokens_s else flops / (mfu * peak)
        return Rate(step_s, tokens / step_s, mfu or flops / step_s / peak, "given")
    time = time_step(work, cluster)
    # Batches are assembled while a step runs: they cost nothing until they take longer than it.
    reading_s = tokens * task.row_ranks / cluster.size / LOADER_TOKENS_S
    step_s = max(time.total, reading_s)
    bound = "data" if reading_s > time.total else time.bound
    return Rate(step_s, tokens / step_s, flops / step_s / peak, bound, time)
