"""AdamW, Lion and Adafactor, and weight decay: update rules as torch optimizers, each with its builder.

    decay_cautiously  before AdamW's step     the decay that its fused kernel would apply everywhere
    Lion              any tensor              sign of an interpolated momentum
    Adafactor         matrices                torch's, over whole matrices

Rules of matrices, here and in `muon.py` and `soap.py`, run in `WholeOptimizer`
(`matrices.py`), which gives them each matrix whole. Cautious decay (Chen et al. 2025, Algorithm 1)
shrinks a weight where its update has the sign of the weight, and shrinks it too. Gradient clipping,
skipped steps and loss scaling belong to the engine.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pretrain.config.optim import OptimConfig
from pretrain.optim.groups import ParameterGroup, split_hidden
from pretrain.optim.matrices import MakeRule, WholeGroup, WholeOptimizer


def torch_groups(groups: list[ParameterGroup], config: OptimConfig) -> list[dict[str, Any]]:
    """Returns a torch group for each group, with its name under the key `name`."""
    return [
        {
            "params": list(group.parameters),
            "weight_decay": config.weight_decay / group.scale.lr if group.decays else 0.0,
            "eps": config.eps * group.scale.eps,
            "name": group.name,
            "lr_ratio": group.lr_ratio,
        }
        for group in groups
    ]


class AdamW(torch.optim.AdamW):
    """torch's AdamW, whose step does not import the compiler."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Steps every parameter that has a gradient."""
        # The decorator of torch's method imports the compiler, to break a graph.
        return inspect.unwrap(torch.optim.AdamW.step)(self, closure)


def build_adamw(groups: list[ParameterGroup], config: OptimConfig, device: torch.device) -> torch.optim.Optimizer:
    """Builds AdamW (Loshchilov and Hutter 2019) in one fused kernel, on CUDA and on CPU.

    State after the first step: two moments for each parameter, in its shape and dtype. `device` is
    that of the parameters when the optimizer runs.
    """
    # On one CPU core the fused kernel is 3 times as fast as torch's loop for many small tensors, 8
    # times for one of 20M.
    dicts = torch_groups(groups, config)
    if config.cautious_decay:
        for group in dicts:
            group |= {"weight_decay": 0.0, "cautious_decay": group["weight_decay"]}
    optimizer = AdamW(
        dicts,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=device.type in ("cuda", "cpu"),
    )
    if config.cautious_decay:
        optimizer.register_step_pre_hook(decay_cautiously)
    return optimizer


def step_hidden(
    groups: list[ParameterGroup],
    config: OptimConfig,
    device: torch.device,
    make: Callable[[ParameterGroup], MakeRule],
    lr: float,
) -> WholeOptimizer:
    """Builds the rules of the hidden matrices of each group, at the peak rate `lr`, and AdamW for everything else."""
    split = [split_hidden(group) for group in groups]
    whole = [
        WholeGroup(hidden, make(hidden), lr, lr / config.lr * hidden.lr_ratio) for hidden, _ in split if hidden.names
    ]
    rest = [rule_group for _, rule_group in split if rule_group.names]
    return WholeOptimizer(whole, build_adamw(rest, config, device) if rest else None)


@torch.no_grad()
def decay_cautiously(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Applies `cautious_decay` of each group of an AdamW: a hook before its step, whose own decay is 0.

    The sign of AdamW's update is that of the first moment, which is computed here ahead of the
    kernel; costs the memory of two more copies of the largest tensor.
    """
    for group in optimizer.param_groups:
        shrink = group["lr"] * group["cautious_decay"]
        for parameter in group["params"] if shrink else ():
            if parameter.grad is not None:
                moment = optimizer.state[parameter].get("exp_avg")
                update = parameter.grad if moment is None else moment.lerp(parameter.grad, 1 - group["betas"][0])
                apply_decay(parameter, update, shrink, cautious=True)


def apply_decay(weight: Tensor, update: Tensor, shrink: float, *, cautious: bool) -> None:
    """Shrinks a weight in place by `shrink` times itself; `cautious`: where the update, to be subtracted, agrees."""
    if cautious:
        weight.sub_(weight * (update * weight >= 0), alpha=shrink)
    else:
        weight.mul_(1 - shrink)


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, Algorithm 2): the sign of `beta1 m + (1 - beta1) g`, with decoupled decay.

    State: one momentum, in the parameter's shape and dtype. Elementwise, so it steps flat pieces.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        cautious: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self._cautious = cautious

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Steps every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            weights = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not weights:
                continue
            moments = []
            for weight in weights:
                state = self.state[weight]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
                moments.append(state["exp_avg"])
            gradients = [weight.grad for weight in weights]
            beta1, beta2 = group["betas"]
            updates = torch._foreach_lerp(moments, gradients, 1 - beta1)
            torch._foreach_sign_(updates)
            for weight, update in zip(weights, updates, strict=True):
                apply_decay(weight, update, group["lr"] * group["weight_decay"], cautious=self._cautious)
            torch._foreach_add_(weights, updates, alpha=-group["lr"])
            torch._foreach_lerp_(moments, gradients, 1 - beta2)


def build_lion(groups: list[ParameterGroup], config: OptimConfig, device: torch.device) -> Lion:
    """Builds Lion (Chen et al. 2023); state after the first step: one momentum for each parameter."""
    betas = (config.beta1, config.beta2)
    return Lion(torch_groups(groups, config), config.lr, betas, config.weight_decay, config.cautious_decay)


# Adafactor (Shazeer and Stern 2018), the optimizer of T5.
#
# The variance of a matrix's gradient is stored as its row and column means: R + C numbers instead
# of R x C, without a first moment. The step of a matrix is relative to its own root mean square,
# so `optim.lr` is a fraction: T5's is `lr: 1e-2` under `schedule: {kind: inverse_sqrt, hold_steps:
# 10000}`, without decay. The paper and torch bound that fraction by 1 / sqrt(step): an `lr` of
# 1e-2 for more than 10,000 steps reaches the bound.

_ROOT_FLOOR = 1e-18
"""torch's epsilon 1: lower bound of the root of the variance and of the mean of the row factors.

torch's default, 1e-7, is as large as the gradients of a big model; the paper's 1e-30 becomes 0
when torch squares it.
"""


def build_adafactor(groups: list[ParameterGroup], config: OptimConfig, device: torch.device) -> WholeOptimizer:
    """Builds torch's Adafactor over all parameters.

    State after the first step: row and column variances of a matrix, all variances of a vector.
    """
    options = config.adafactor
    make = partial(
        torch.optim.Adafactor,
        lr=config.lr,
        beta2_decay=-options.decay_rate,
        eps=(_ROOT_FLOOR, options.min_scale),
        d=options.clip_threshold,
    )
    whole = []
    for group in groups:
        decay = config.weight_decay if group.decays else 0.0
        whole.append(WholeGroup(group, partial(make, weight_decay=decay), config.lr, group.lr_ratio))
    return WholeOptimizer(whole, None)
