"""Parameters made and cut up one by one, for ZeRO stage 3: a rank never holds a whole model, at no moment.

    on the meta device -> for each parameter: draw it, keep this rank's share, let the rest go -> build_engine

The costs at any time are the shares and one parameter. The objects stay the same: names and groups that were made of
the parameters on the meta device hold.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pretrain.config.engine import EngineConfig

if TYPE_CHECKING:
    from accelerate import Accelerator


_WORKING_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def builds_sharded(config: EngineConfig) -> bool:
    """Returns whether a model is to be built on the meta device and filled by `fill_sharded`."""
    return config.kind == "deepspeed" and config.zero_stage == 3


def fill_sharded(
    model: nn.Module, draw: Callable[[str, torch.Size], Tensor], config: EngineConfig, accelerator: "Accelerator"
) -> None:
    """Gives the parameters of a model on the meta device their values, each cut over the ranks at once. Collective.

    Args:
        model: Parameters on the meta device; shared ones are done once.
        draw: Returns the initial value of a parameter, whole; the same on every rank.
        config: The dtype of the working weights is that of its precision.
        accelerator: From `start_accelerator`, with its DeepSpeed plugin.
    """
    import deepspeed

    dtype = _WORKING_DTYPES[config.precision]
    cut: Any = None
    for name, parameter in model.named_parameters():
        value = draw(name, parameter.shape).to(accelerator.device, dtype)
        torch.utils.swap_tensors(parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))
        if cut is None:
            holder = nn.Module()
            holder.register_parameter("weight", parameter)
            plugin = accelerator.state.deepspeed_plugin
            deepspeed.zero.Init(module=holder, config_dict_or_path=plugin.deepspeed_config, dtype=dtype)
            cut = parameter.convert_to_zero_parameters
        else:
            cut([parameter])
