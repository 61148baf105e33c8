"""Times of parts of a step beside its largest kernels: a block, an update, and launches alone."""

from collections.abc import Callable
from typing import Any

from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.plan.cluster import Cluster
from pretrain.plan.gpus import Constants, Gpu
from pretrain.plan.launches import LAUNCHES
from pretrain.plan.roofline import Work, plan_work, time_step
from pretrain.plan.task import ParallelLayout, task_of

DEPTHS = (1, 3)
"""Layers of the two models whose difference is that of blocks alone."""
_FEW_TOKENS = 16
_UPDATED = {"cuda": 2**27, "cpu": 2**24}  # values of an update


def shallow(config: RunConfig, layers: int) -> RunConfig:
    """Returns a config with fewer layers, whose blocks keep all that they compute."""
    stack = "encoder" if config.model.decoder is None else "decoder"
    cut = getattr(config.model, stack).model_copy(update={"layers": layers})
    plain = {"activation_checkpointing": "none", "offload_activations": "none", "fp8": "off"}
    engine = config.engine.model_copy(update=plain)
    model = config.model.model_copy(update={stack: cut})
    return config.model_copy(update={"model": model, "engine": engine})


def has_blocks(config: RunConfig) -> bool:
    """Returns whether a config has one stack that reads tokens, whose blocks can be timed alone."""
    model = config.model
    return isinstance(model, ModelConfig) and len(config.stacks) == 1 and model.input is None


def time_block(
    torch: Any, config: RunConfig, device: str, seconds_of: Callable[[Callable[[], Any]], float]
) -> dict[str, float]:
    """Returns the seconds of both passes of blocks.

    Args:
        torch: The module.
        config: A config with one stack.
        device: `cuda` or `cpu`.
        seconds_of: Returns the seconds of a call.

    Returns:
        `block`, on a micro-batch, and `launched`, on so few tokens that a GPU waits for its host.
    """
    sizes = {"block": (config.batch.micro, config.lengths.target), "launched": (1, _FEW_TOKENS)}
    seconds = {}
    for name, size in sizes.items():
        few, more = (_time_model(torch, shallow(config, layers), device, size, seconds_of) for layers in DEPTHS)
        seconds[name] = max(0.0, more - few) / (DEPTHS[1] - DEPTHS[0])
    return seconds


def _time_model(
    torch: Any,
    config: RunConfig,
    device: str,
    size: tuple[int, int],
    seconds_of: Callable[[Callable[[], Any]], float],
) -> float:
    from pretrain.model import build_model, init_weights
    from pretrain.types import Batch

    model_config, engine = task_of(config).model, config.engine
    model = build_model(model_config, engine, torch.device(device))
    init_weights(model, model_config, seed=0)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[engine.precision]
    if engine.kind == "deepspeed":
        model = model.to(dtype)
    tokens_BT = torch.zeros(size, dtype=torch.int64, device=device)
    batch = Batch(tokens_BT, tokens_BT.clone())
    autocasts = engine.kind != "deepspeed" and dtype != torch.float32

    def both_passes() -> None:
        with torch.autocast(device, dtype, enabled=autocasts):
            hidden_BTD = model(batch, logits=False).hidden_BTD
        torch.autograd.backward(hidden_BTD, torch.ones_like(hidden_BTD))
        model.zero_grad(set_to_none=True)

    return seconds_of(both_passes)


def update_speed(torch: Any, device: str, seconds_of: Callable[[Callable[[], Any]], float]) -> float:
    """Returns the bytes a second of AdamW: gradient, weight and two moments read, the latter three written."""
    weight = torch.zeros(_UPDATED[device], device=device, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return 28 * weight.numel() / seconds_of(optimizer.step)


def block_passes(config: RunConfig, gpu: Gpu, constants: Constants, seconds: float) -> float:
    """Returns how often a block moves what it keeps: what its time leaves beside products and attention."""
    works = [_work_of(shallow(config, layers), gpu) for layers in DEPTHS]
    count = DEPTHS[1] - DEPTHS[0]
    times = [time_step(work, Cluster(1, 1, gpu), constants) for work in works]
    compute_s = (times[1].compute - times[0].compute) / count
    num_bytes = (works[1].kept_bytes - works[0].kept_bytes) / count
    bandwidth = gpu.memory_bytes_s * constants.memory_share
    return max(1.0, (seconds - compute_s) * bandwidth / num_bytes)


def _work_of(config: RunConfig, gpu: Gpu) -> Work:
    device = "cpu" if gpu.generation == "cpu" else "cuda"
    return plan_work(task_of(config), ParallelLayout(config.engine, config.batch.micro, 1), 1, device)


def launch_seconds(engine: EngineConfig, device: str, seconds: float) -> float:
    """Returns the time of a launch, of a block's on few tokens."""
    return seconds / LAUNCHES[engine.compiles(device)]
