"""The DeepSpeed engine, ZeRO 0 to 3 behind accelerate: its config, its steps, and dropped steps.

Weights and moments, which DeepSpeed stores by stage, are in `zero_state.py`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.config.data import BatchPlan
from pretrain.config.engine import EngineConfig
from pretrain.dist import World
from pretrain.engine.engine import Update
from pretrain.engine.replicated import WrappedModule, clip_or_drop, set_optimizer_step
from pretrain.engine.zero_state import build_zero_state, never_raise, read_loss_scale, set_loss_scale
from pretrain.errors import LaunchError
from pretrain.model.stack import Block
from pretrain.plan.memory import plan_buckets
from pretrain.types import Batch

NEVER = 2**31


def deepspeed_config(
    config: EngineConfig, device: str, grad_clip: float, plan: BatchPlan, num_parameters: int
) -> dict[str, Any]:
    """Returns the dictionary for `deepspeed.initialize`, on `cuda` or `cpu`.

    Buckets are sized from the model: DeepSpeed's defaults (5e8 elements) take 1-2 GB whatever the model. The
    accumulation count is for DeepSpeed's own bookkeeping; the engine sets the boundary at each micro-batch.
    """
    buckets = plan_buckets(num_parameters, config.zero_stage)
    zero: dict[str, Any] = {
        "stage": config.zero_stage,
        "reduce_bucket_size": buckets.reduce_bucket_size,
        "allgather_bucket_size": buckets.allgather_bucket_size,
        "contiguous_gradients": True,
        "overlap_comm": False,
    }
    if config.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": buckets.stage3_prefetch_bucket_size,
            "stage3_param_persistence_threshold": buckets.stage3_param_persistence_threshold,
        }
    # Pinned memory speeds up copies to a GPU; without one it is wasted.
    host = {"device": "cpu", "pin_memory": device == "cuda"}
    if config.offload_optimizer == "cpu":
        zero["offload_optimizer"] = host
    if config.offload_params == "cpu":
        zero["offload_param"] = host
    return {
        "train_micro_batch_size_per_gpu": plan.micro,
        "gradient_accumulation_steps": plan.accumulation,
        # Stage 0 in fp32 is a bare torch optimizer: DeepSpeed clips without reporting the norm, so our engine clips.
        "gradient_clipping": 0.0 if clips_itself(config) else grad_clip,
        "bf16": {"enabled": config.precision == "bf16"},
        # A loss scale of 0 means dynamic. The rest are DeepSpeed's defaults, fixed here.
        "fp16": {
            "enabled": config.precision == "fp16",
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # torch's fused AdamW runs on the host, and needs no compiler there.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": NEVER,
    }


def clips_itself(config: EngineConfig) -> bool:
    """Tells whether our engine clips and checks the gradient, because DeepSpeed's optimizer does not."""
    return config.zero_stage == 0 and config.precision == "fp32"


# Dropping a step: DeepSpeed's own path for a gradient that is not finite, triggered by a patched method.
#
#     ZeRO 1, 2         the norm of the gradient is infinite
#     ZeRO 3            the norms of its groups are infinite
#     stage 0, bf16     the overflow check reports an overflow
#
# Weights and moments are unchanged, buffers are cleared, and every rank drops the same step, so that no collective is
# left unmatched. The loss scale of fp16, which DeepSpeed halves then, is restored.

INFINITE = float("inf")


@contextlib.contextmanager
def dropping(optimizer: Any) -> Iterator[None]:
    """Context in which a step of `DeepSpeedEngine.optimizer` discards the gradient."""
    scale = read_loss_scale(optimizer)
    owner, name, answer = _overflow_hook(optimizer)
    setattr(owner, name, lambda *arguments, **named: answer)
    try:
        yield
    finally:
        delattr(owner, name)  # uncovers the method of the class
        set_loss_scale(optimizer, scale)


def _overflow_hook(optimizer: Any) -> tuple[Any, str, Any]:
    """Returns the object and the name of the method that detects a non-finite gradient, and its result then."""
    if hasattr(optimizer, "overflow_checker"):
        return optimizer.overflow_checker, "has_overflow", True
    if hasattr(optimizer, "_get_norm_groups"):
        return optimizer, "_get_norm_groups", [INFINITE]
    return optimizer, "scaled_global_norm", INFINITE


def _check_offload(optimizer: Any, config: EngineConfig, device: torch.device) -> None:
    """Checks that DeepSpeed offloads what the config requests. Raises: LaunchError."""
    # The attribute of offloading has one name at stages 1 and 2, and two others at stage 3.
    found = {
        "offload_optimizer": getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False),
        "offload_params": getattr(optimizer, "offload_param", False),
    }
    masters = getattr(
        optimizer, "single_partition_of_fp32_groups", getattr(optimizer, "fp32_partitioned_groups_flat", ())
    )
    place = "cpu" if config.offload_optimizer != "none" else device.type
    wrong = [name for name, is_on in found.items() if bool(is_on) != (getattr(config, name) != "none")]
    if not wrong and any(master.device.type != place for master in masters):
        wrong = ["offload_optimizer"]
    if wrong:
        raise LaunchError(
            f"engine.{wrong[0]}={getattr(config, wrong[0])} was asked for, DeepSpeed did otherwise",
            fix="report this as a bug",
        )


class DeepSpeedZeroEngine(WrappedModule):
    """A `deepspeed.DeepSpeedEngine` at the ZeRO stage of the config."""

    def __init__(
        self,
        module: nn.Module,
        names: dict[int, str],
        optimizer: torch.optim.Optimizer,
        accelerator: Any,
        config: EngineConfig,
        grad_clip: float,
        plan: BatchPlan,
        world: World,
    ) -> None:
        import deepspeed

        if config.compile and config.zero_stage == 3:
            # Gathers the weights of a block at once, by hooks outside of its compiled graph.
            deepspeed.utils.set_z3_leaf_modules(module, [Block])
        # Some of DeepSpeed's optimizers step with zero gradients when they are built, and weight decay would shrink
        # the fp32 masters then. `update` sets the learning rate of each step.
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        wrapped, _ = accelerator.prepare(module, optimizer)
        if not isinstance(wrapped, deepspeed.DeepSpeedEngine):
            raise LaunchError(
                f"DeepSpeed was asked for, accelerate built {type(wrapped).__name__}",
                fix="report this as a bug",
            )
        if wrapped.zero_optimization_stage() != config.zero_stage:
            raise LaunchError(
                f"ZeRO stage {config.zero_stage} was asked for, stage {wrapped.zero_optimization_stage()} runs",
                fix="report this as a bug",
            )
        _check_offload(wrapped.optimizer, config, accelerator.device)
        super().__init__(wrapped, module, names)
        self.device = accelerator.device
        stage = f"ZeRO-{config.zero_stage}"
        host = [name for name in ("optimizer", "params") if getattr(config, f"offload_{name}") != "none"]
        on_host = f", {' and '.join(host)} in host memory" if host else ""
        self.description = f"DeepSpeed {stage}, {config.precision}, {world.size} x {self.device.type}{on_host}"
        self._clip = grad_clip if clips_itself(config) else None
        self._parameters = list(module.parameters())
        self.is_sharded = config.zero_stage == 3
        never_raise(wrapped.optimizer)
        self.state = build_zero_state(wrapped, names, config.zero_stage, world)
        # Undo the count of the step at construction.
        set_optimizer_step(wrapped.basic_optimizer, 0)

    def forward_backward(self, batch: Batch, scale: float, is_last: bool) -> Tensor:
        """See `Engine.forward_backward`."""
        # Setting the mode walks every module. DeepSpeed's own `training` flag is not updated by its `eval()`.
        if not self._wrapped.module.training:
            self._wrapped.train()
        self._wrapped.set_gradient_accumulation_boundary(is_last)
        loss_sum, sums = self._wrapped(batch)
        self._wrapped.backward(loss_sum * scale, scale_wrt_gas=False)
        return sums

    def update(self, learning_rate: float, drop: bool = False) -> Update:
        """See `Engine.update`."""
        for group in self._wrapped.basic_optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_ratio", 1.0)
        if self._clip is not None:
            update = clip_or_drop(self._parameters, self._clip, drop)
            self._wrapped.step()
            return update
        with dropping(self._wrapped.optimizer) if drop else contextlib.nullcontext():
            self._wrapped.step()
        skipped = not self._wrapped.was_step_applied()
        return Update(float("nan") if skipped else float(self._wrapped.get_global_grad_norm()), skipped)
