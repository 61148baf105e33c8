"""Optimizer moments: created before there was a first step, viewed flat, and their step count set.

torch optimizers make their state in the first `step()`. Loading needs it before, and saving at step 0 too. Every state
tensor that has the shape of its parameter is a moment; `step` is the count that bias correction uses.
"""

import torch
from torch import Tensor

MOMENTS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {torch.optim.AdamW: ("exp_avg", "exp_avg_sq")}
"""The state tensors, shaped like the parameter, that each optimizer keeps."""


def create_moments(optimizer: torch.optim.Optimizer) -> None:
    """Creates missing state as the optimizer itself would before its first step: zeros, and a step count of 0."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            create_moments_of(optimizer, parameter)


def create_moments_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    """Creates the state of one parameter where it is missing."""
    state = optimizer.state[parameter]
    if not state:
        # The fused kernels want the count beside the parameter.
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for key in MOMENTS[type(optimizer)]:
            state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def moment_views(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Returns flat live views of a parameter's moments, by name."""
    state = optimizer.state[parameter]
    return {key: state[key].view(-1) for key in MOMENTS[type(optimizer)]}


def set_optimizer_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Sets the step count of every parameter."""
    for state in optimizer.state.values():
        state["step"].fill_(step)
