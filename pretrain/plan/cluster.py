"""The machines that a run is planned for."""

import difflib
from dataclasses import dataclass

from pretrain.errors import ConfigError
from pretrain.plan.calibration import Calibration
from pretrain.plan.constants import CONSTANTS, Constants
from pretrain.plan.gpus import GPUS, Gpu
from pretrain.plan.roofline import Network

OVERLAPS = {"deepspeed": False, "ddp": True, "single": True}
"""Whether gradients travel while the backward pass goes on, by `engine.kind`: as `deepspeed_config` sets it."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of one kind.

    Attributes:
        nodes: How many.
        per_node: GPUs of each; on CPUs, ranks.
        gpu: What they are.
        calibration: What was measured on such a GPU; None: nothing was.
    """

    nodes: int
    per_node: int
    gpu: Gpu
    calibration: Calibration | None = None

    @property
    def size(self) -> int:
        """Ranks."""
        return self.nodes * self.per_node

    @property
    def device(self) -> str:
        """As torch calls it."""
        return "cpu" if self.gpu.generation == "cpu" else "cuda"

    @property
    def constants(self) -> Constants:
        """Of the roofline: those that were measured, or those that were fitted on published runs."""
        return CONSTANTS if self.calibration is None else self.calibration.constants(self.gpu)

    def network(self, kind: str, zero_stage: int) -> Network:
        """Returns how an engine communicates on it."""
        return Network(self.nodes, self.per_node, zero_stage, OVERLAPS.get(kind, False))


def find_gpu(name: str) -> Gpu:
    """Returns a GPU by the name that `--gpu` takes. Raises: ConfigError, with the nearest ones."""
    if name.lower() not in GPUS:
        near = difflib.get_close_matches(name.lower(), GPUS, n=3, cutoff=0.3) or list(GPUS)
        raise ConfigError(f"unknown GPU {name!r}", where="--gpu", fix=f"use {' or '.join(near)}")
    return GPUS[name.lower()]
