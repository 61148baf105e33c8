"""What of a peak is reached: constants of the roofline, fitted on published runs (docs/plan.md prints the errors)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shares:
    """Of a generation of GPUs.

    Attributes:
        products: Share of the peak that products of wide matrices reach.
        half_width: Width at which they reach half of that share.
        attention: Share of the peak that attention reaches, all pairs counted, whether a mask hides them or not.
    """

    products: float
    half_width: float
    attention: float


@dataclass(frozen=True, slots=True)
class Constants:
    """Of all.

    Attributes:
        shares: By generation.
        passes: How often elementwise kernels move what a block keeps: written, read, and the same for gradients.
        logit_bytes: Moved for each score of the loss.
        memory_share: Of the bandwidth of memory.
        link_share: Of the links within a node.
        network_share: Of the network.
        hides: Share of the computation that communication can hide behind.
        never_hidden: Share of communication that does not hide.
        latency_s: Of a collective.
        latency_node_s: The same for each node.
        host_bytes_s: Between host and device, for each rank (PCIe 4, shared).
    """

    shares: dict[str, Shares]
    passes: float
    logit_bytes: float
    memory_share: float
    link_share: float
    network_share: float
    hides: float
    never_hidden: float
    latency_s: float
    latency_node_s: float
    host_bytes_s: float


CONSTANTS = Constants(
    shares={
        "ampere": Shares(products=0.73, half_width=383.0, attention=0.63),
        "hopper": Shares(products=0.583, half_width=715.0, attention=0.35),
        "cpu": Shares(products=0.5, half_width=64.0, attention=0.25),
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
