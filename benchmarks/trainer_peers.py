"""The arms of benchmarks/trainer.py that ours is compared with: loops as the documentation of each peer has them."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.run import RunConfig
from pretrain.engine.build import deepspeed_config
from pretrain.model import build_model, init_weights
from pretrain.objective import build_loss
from pretrain.optim.build import build_optimizer
from pretrain.optim.groups import group_parameters
from pretrain.plan.params import count_parameters
from pretrain.training.build import Run
from pretrain.training.step import TrainModule
from pretrain.types import Batch


@dataclass(slots=True)
class BareLoop:
    """What a peer's documentation shows, over batches in memory.

    Attributes:
        step: Takes a batch and the scale of its loss; returns this rank's scaled loss, whose mean over the ranks is the
            token mean over the global batch.
        batches: For ever.
    """

    step: Callable[[Batch, float], Tensor]
    batches: Iterator[tuple[Batch, float]]

    def take(self, steps: int, around: Callable[[], Any] = contextlib.nullcontext) -> list[Tensor]:
        """Takes some steps; returns their losses."""
        with around():
            return [self.step(*next(self.batches)) for _ in range(steps)]


def forget_accelerate() -> None:
    """Clears accelerate's process-wide state, so that a second engine can be built."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def build_module(config: RunConfig) -> tuple[TrainModule, torch.optim.Optimizer]:
    """Builds what every peer trains: our model with the weights that a run starts from, and our optimizer."""
    device = torch.device("cpu")
    model = build_model(config.model, PLAIN_ENGINE, device)
    init_weights(model, config.model, config.seed)
    optimizer = build_optimizer(group_parameters(model), config.optim, device)
    return TrainModule(model, build_loss(config.objective)), optimizer


def bare_deepspeed(run: Run, config: RunConfig, *, defaults: bool) -> Callable[[Batch, float], Tensor]:
    """Returns a step as DeepSpeed's guide to getting started has it."""
    import deepspeed

    module, optimizer = build_module(config)
    num_parameters = count_parameters(config.model)
    settings = deepspeed_config(config.engine, "cpu", config.optim.grad_clip, run.plan, num_parameters)
    settings["gradient_clipping"] = config.optim.grad_clip
    if defaults:
        settings["zero_optimization"] = {"stage": config.engine.zero_stage}
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)

    def step(batch: Batch, scale: float) -> Tensor:
        loss_sum, _ = engine(batch)
        loss = loss_sum * scale
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def bare_ddp(config: RunConfig) -> Callable[[Batch, float], Tensor]:
    """Returns a step of torch's DDP with its documented saving of a copy."""
    module, optimizer = build_module(config)
    wrapped = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)

    def step(batch: Batch, scale: float) -> Tensor:
        optimizer.zero_grad()
        loss_sum, _ = wrapped(batch)
        loss = loss_sum * scale
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), config.optim.grad_clip)
        optimizer.step()
        return loss.detach()

    return step


def build_peers(run: Run, config: RunConfig, batches: list[tuple[Batch, float]]) -> dict[str, BareLoop]:
    steps = {
        "deepspeed": bare_deepspeed(run, config, defaults=False),
        "deepspeed_defaults": bare_deepspeed(run, config, defaults=True),
        "ddp": bare_ddp(config),
    }
    return {name: BareLoop(step, itertools.cycle(batches)) for name, step in steps.items()}
