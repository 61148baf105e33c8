"""The engine without DeepSpeed: one process, or torch's DistributedDataParallel."""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.config.engine import EngineConfig
from pretrain.dist import World
from pretrain.engine.engine import Update
from pretrain.engine.replicated import ReplicatedState, WrappedModule, clip_or_drop
from pretrain.errors import LaunchError
from pretrain.types import Batch, FragmentStore


class TorchEngine(WrappedModule):
    """DDP or a single process; weights, gradients and moments are whole on every rank."""

    def __init__(
        self,
        module: nn.Module,
        names: dict[int, str],
        optimizer: torch.optim.Optimizer,
        accelerator: Any,
        config: EngineConfig,
        grad_clip: float,
        world: World,
    ) -> None:
        # evaluation_mode makes accelerate move and autocast a model without the wrapper of DDP.
        wrapped = accelerator.prepare_model(module, evaluation_mode=config.kind == "single")
        is_ddp = isinstance(wrapped, nn.parallel.DistributedDataParallel)
        if is_ddp != (config.kind == "ddp"):
            raise LaunchError(
                f"engine.kind={config.kind} was asked for, accelerate built {type(wrapped).__name__}",
                fix="report this as a bug",
            )
        super().__init__(wrapped, module, names)
        self.device = accelerator.device
        self.description = f"{config.kind}, {config.precision}, {world.size} x {self.device.type}"
        self._optimizer = optimizer
        self._grad_clip = grad_clip
        self._is_ddp = is_ddp
        self._parameters = list(module.parameters())
        self.is_sharded = False
        masters = [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]
        self.state: FragmentStore = ReplicatedState(masters, optimizer, world)

    def forward_backward(self, batch: Batch, scale: float, is_last: bool) -> Tensor:
        """See `Engine.forward_backward`."""
        if not self._wrapped.training:  # setting the mode walks every module
            self._wrapped.train()
        waits = self._is_ddp and not is_last
        with self._wrapped.no_sync() if waits else contextlib.nullcontext():
            loss_sum, sums = self._wrapped(batch)
            (loss_sum * scale).backward()
        return sums

    def update(self, learning_rate: float, drop: bool = False) -> Update:
        """See `Engine.update`."""
        update = clip_or_drop(self._parameters, self._grad_clip, drop)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_ratio", 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return update
