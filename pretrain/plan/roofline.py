"""Roofline of a step: work over the reached share of each peak, by kind of kernel.

    projections, head    FLOPs over a share of the peak, which grows with the width of the matrices
    attention            FLOPs over a lower share
    elementwise          bytes moved over a share of the memory's bandwidth: norms, activations, residuals, softmax
    optimizer            the same, once a step
    network              bytes by ZeRO stage over the slower of links and network, less what hides behind computation

The shares are fitted on published runs (`gpus.py`). The bound is the part that takes longest.
"""

from dataclasses import dataclass

from pretrain.plan.gpus import CONSTANTS, Constants, Gpu


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one rank in a step."""

    projection_flops: float  # products with weights of a micro-batch, forward and backward, without the head
    attention_flops: float  # scores and mixing, counted as for MFU: masked pairs too
    head_flops: float  # products of the head
    projection_forward: float  # forward part of `projection_flops`
    attention_forward: float  # forward part of `attention_flops`
    recompute: float  # share of the forward pass that is run again
    width: int  # model width, D
    kept_bytes: float  # activations of a micro-batch without checkpointing, for elementwise traffic
    logits: float  # scores that the loss reads in a micro-batch
    parameters: float  # weights of the whole model
    trained: float  # weights with a gradient
    weight_bytes: int  # bytes of a working weight, and of its gradient on the wire
    layers: int  # blocks, as many as there are gathers
    state_bytes: float  # gradients and optimizer state that the update reads, on this rank
    offload_bytes: float  # bytes between host and device in a step
    accumulation: int  # micro-batches of a step
    fp32: bool = False  # true: products are in fp32

    @property
    def model_flops(self) -> float:
        """Useful work of a step on this rank."""
        return self.accumulation * (self.projection_flops + self.attention_flops + self.head_flops)


@dataclass(frozen=True, slots=True)
class Network:
    """Nodes of `per_node` ranks, the ZeRO stage (0 also for DDP), and True where communication overlaps computation."""

    nodes: int
    per_node: int
    zero_stage: int
    overlaps: bool

    @property
    def size(self) -> int:
        """Ranks."""
        return self.nodes * self.per_node


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step by part; the sum is the step."""

    projections: float
    attention: float
    elementwise: float
    optimizer: float
    network: float
    offload: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.memory + self.network + self.offload

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
        """Longest part: compute, memory, network or offload."""
        parts = {"compute": self.compute, "memory": self.memory, "network": self.network, "offload": self.offload}
        return max(parts, key=lambda name: parts[name])


def wire_bytes(work: Work, network: Network) -> tuple[float, float]:
    """Returns bytes over a rank's link in a step: with each micro-batch, and once (Rajbhandari et al. 2020, 7).

    An all-reduce of gradients costs twice their size, a reduce-scatter once. DeepSpeed's stage 2 scatters after every
    micro-batch; stage 3 also gathers the weights twice in each, frozen ones too.
    """
    if network.size == 1:
        return 0.0, 0.0
    gradients = work.trained * work.weight_bytes
    if network.zero_stage == 3:
        return 2 * work.parameters * work.weight_bytes + gradients, 0.0
    return (gradients, gradients) if network.zero_stage == 2 else (0.0, 2 * gradients)


def link_seconds(num_bytes: float, network: Network, gpu: Gpu, constants: Constants = CONSTANTS) -> float:
    """Returns the seconds of rings over all ranks: one a network card, so that the cards of a node add up."""
    inside = num_bytes * (network.size - 1) / network.size / (gpu.link_bytes_s * constants.link_share)
    if network.nodes == 1:
        return inside
    cards = network.per_node * gpu.network_bytes_s * constants.network_share
    return max(inside, num_bytes * (network.nodes - 1) / network.nodes / cards)


def time_step(work: Work, network: Network, gpu: Gpu, constants: Constants = CONSTANTS) -> StepTime:
    """Predicts a step."""
    shares = constants.shares[gpu.generation]
    peak = gpu.flops_fp32 if work.fp32 else gpu.flops
    again = 1 + work.recompute / 3  # of what is moved, a third is the forward pass's
    products = shares.products * work.width / (work.width + shares.half_width)
    projection_flops = work.projection_flops + work.recompute * work.projection_forward
    projections = (projection_flops + work.head_flops) / (peak * products)
    attention = (work.attention_flops + work.recompute * work.attention_forward) / (peak * shares.attention)
    bandwidth = gpu.memory_bytes_s * constants.memory_share
    moved = constants.passes * work.kept_bytes * again + constants.logit_bytes * work.logits
    elementwise = moved / bandwidth
    micro = projections + attention + elementwise
    often, once = wire_bytes(work, network)
    gathers = 3 * work.layers if network.zero_stage == 3 and network.size > 1 else 0
    latency = gathers * (constants.latency_s + constants.latency_node_s * network.nodes)
    wire = link_seconds(often, network, gpu, constants) + latency
    last = link_seconds(once, network, gpu, constants)
    if network.overlaps:
        wire = max(constants.never_hidden * wire, wire - constants.hides * micro)
        last = max(constants.never_hidden * last, last - constants.hides * micro * 2 / 3)
    count = work.accumulation
    return StepTime(
        projections=count * projections,
        attention=count * attention,
        elementwise=count * elementwise,
        optimizer=2 * work.state_bytes / bandwidth,
        network=count * wire + last,
        offload=work.offload_bytes / constants.host_bytes_s,
    )
