"""The DeepSpeed config of a run, as a pure function."""

from typing import Any

from pretrain.config.data import BatchPlan
from pretrain.config.engine import EngineConfig
from pretrain.plan.memory import plan_buckets

NEVER = 2**31


def deepspeed_config(
    config: EngineConfig, device: str, grad_clip: float, plan: BatchPlan, num_parameters: int
) -> dict[str, Any]:
    """Returns the dictionary for `deepspeed.initialize`, on `cuda` or `cpu`.

    Buckets are sized from the model: DeepSpeed's defaults (5e8 elements) take 1-2 GB whatever the model. The
    accumulation count is for DeepSpeed's own bookkeeping; the engine sets the boundaries, micro-batch by micro-batch.
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
    # Pinned memory is what a GPU copies from; without one there is nothing to copy to.
    host = {"device": "cpu", "pin_memory": device == "cuda"}
    if config.offload_optimizer == "cpu":
        zero["offload_optimizer"] = host
    if config.offload_params == "cpu":
        zero["offload_param"] = host
    return {
        "train_micro_batch_size_per_gpu": plan.micro,
        "gradient_accumulation_steps": plan.accumulation,
        # Stage 0 in fp32 is a bare torch optimizer, which DeepSpeed clips without telling the norm: clipped by us.
        "gradient_clipping": 0.0 if clips_itself(config) else grad_clip,
        "bf16": {"enabled": config.precision == "bf16"},
        # A loss scale of 0 is a dynamic one. The rest are DeepSpeed's defaults, written down.
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
    """Returns whether our engine clips and checks the gradient, because DeepSpeed's optimizer does not."""
    return config.zero_stage == 0 and config.precision == "fp32"
