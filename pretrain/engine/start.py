"""Starts accelerate, and with it the process group, on the device and backend of the config."""

import os
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from pretrain.config.data import BatchPlan
from pretrain.config.engine import EngineConfig
from pretrain.dist import World
from pretrain.engine.deepspeed_config import deepspeed_config
from pretrain.errors import ConfigError, LaunchError
from pretrain.utils.log import quiet_libraries

if TYPE_CHECKING:
    from accelerate import Accelerator


def pick_device(config: EngineConfig) -> str:
    """Returns `cuda` or `cpu`. Raises: ConfigError where CUDA is asked for, or needed, and absent."""
    if config.precision == "fp16" and not torch.cuda.is_available():
        raise ConfigError(
            "engine.precision=fp16 needs a GPU, and torch sees none", fix="use engine.precision=bf16, or fp32"
        )
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "engine.device=cuda, but torch sees no GPU", fix="use engine.device=auto, or install a CUDA torch"
        )
    return "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"


def start_accelerator(
    config: EngineConfig, grad_clip: float, plan: BatchPlan, num_parameters: int, world: World
) -> "Accelerator":
    """Brings up the process group and returns accelerate's front. Collective.

    Raises:
        ConfigError: `single` with several ranks, or a device that is not there.
        LaunchError: The ranks cannot reach each other, or a package is missing.
    """
    device = pick_device(config)
    if config.kind == "single" and world.size > 1:
        raise ConfigError(f"engine.kind=single, but {world.size} ranks run", fix="use engine.kind=ddp or deepspeed")
    # accelerate and deepspeed call collectives by names that torch is renaming; the user can do nothing about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if device == "cuda":
        torch.cuda.set_device(world.local_rank)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    # `accelerate launch` exports its own idea of engine and precision; the config is the only one that counts.
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    kwargs: dict[str, Any] = {"mixed_precision": "no" if config.precision == "fp32" else config.precision}
    if config.kind == "deepspeed":
        kwargs["gradient_accumulation_steps"] = plan.accumulation
        kwargs["deepspeed_plugin"] = _deepspeed_plugin(device, config, grad_clip, plan, num_parameters)
    else:
        # With cpu=True accelerate would drop a DeepSpeed plugin without a word; here there is none to drop.
        kwargs["cpu"] = device == "cpu"
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    backend = "nccl" if device == "cuda" else "gloo"
    group = InitProcessGroupKwargs(backend=backend, timeout=timedelta(seconds=config.group_timeout_s))
    try:
        return Accelerator(kwargs_handlers=[group], **kwargs)
    except (torch.distributed.DistError, OSError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise LaunchError(
            f"cannot set up the process group: {str(error).splitlines()[0]}",
            where=f"rank {world.rank} at {address}",
            fix="see that the port is free and that every rank reaches that address",
        ) from error


def _deepspeed_plugin(device: str, config: EngineConfig, grad_clip: float, plan: BatchPlan, num_parameters: int) -> Any:
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        import deepspeed
    except ImportError as error:
        raise LaunchError(
            f"engine.kind=deepspeed needs the deepspeed package: {error}", fix="install it, or use engine.kind=ddp"
        ) from None
    from accelerate.utils import DeepSpeedPlugin

    quiet_libraries()
    # Its shared-memory op serves inference only, needs a compiler, and leaves segments in /dev/shm after a kill. Where
    # the table of its ops is read first, it compiles a probe for each in TMPDIR, where a kill leaves it: not here.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    return DeepSpeedPlugin(hf_ds_config=deepspeed_config(config, device, grad_clip, plan, num_parameters))
