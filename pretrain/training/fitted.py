"""Arithmetic of `pretrain plan` on the card of a run: FP8 where it pays, the loss at once where it fits."""

import logging

import torch

from pretrain.config.engine import EngineConfig
from pretrain.config.run import RunConfig
from pretrain.dist import World, ranks_of_node
from pretrain.model import LanguageModel
from pretrain.model.parts.head import Head
from pretrain.plan.cluster import Cluster
from pretrain.plan.fp8_choice import choose_fp8
from pretrain.plan.gpus import GPUS, name_of_device
from pretrain.plan.memory import loss_logits
from pretrain.plan.task import ParallelLayout, TrainingTask, task_of

log = logging.getLogger(__name__)


def cluster_of(world: World, device: torch.device) -> Cluster | None:
    """Returns the cluster that a job runs on; None: `plan` does not know its card."""
    name = name_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu"
    per_node = ranks_of_node(world)
    return None if name is None else Cluster(max(1, world.size // per_node), per_node, GPUS[name])


def fit_engine(config: RunConfig, cluster: Cluster | None) -> EngineConfig:
    """Returns the engine with the recipe that `engine.fp8=auto` is: `off` on an unknown card."""
    engine = choose_fp8(config, task_of(config), cluster).engine
    if config.engine.fp8 == "auto":
        log.info("engine.fp8=auto: %s, by `pretrain plan`", engine.fp8)
    return engine


def fit_loss(
    model: LanguageModel, task: TrainingTask, layout: ParallelLayout, cluster: Cluster | None
) -> None:  # fmt: skip
    """Sets the logits that a head holds at once by `engine.loss_chunk`; not on an unknown card."""
    if layout.engine.loss_chunk == "whole" and cluster is not None:
        for head in (module for module in model.modules() if isinstance(module, Head)):
            head.chunk_logits = loss_logits(task, layout, cluster)
