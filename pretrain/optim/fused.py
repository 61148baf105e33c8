"""AdamW and Lion as one compiled kernel over flat fp32 masters of 16-bit weights.

    read      gradient [16 bits], master, moments
    computed  clip by `grad_scale`, the rule, nothing where `found_inf` is 1
    written   master, moments, weight [16 bits]

A step of AdamW moves 28 bytes a parameter here. `found_inf` and `grad_scale` are torch's protocol
of fused optimizers: numbers on the device, for which the host does not wait. Not here: the flat
tensors (`pretrain/engine/masters.py`).
"""

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from pretrain.config.optim import OptimConfig
from pretrain.optim.build import create_moments_of, moments_of
from pretrain.optim.groups import ParameterGroup
from pretrain.optim.rules import Lion, torch_groups

Rule = Callable[[Tensor, list[Tensor], Tensor, tuple[float, float]], tuple[Tensor, list[Tensor]]]
"""Function of (gradient, moments, numbers, betas): the update at a rate of 1, moments after it."""

_RATE, _SHRINK, _EPS, _FIRST, _SECOND = range(5)
"""Numbers of a step: rate, rate times decay, epsilon, and bias corrections of both moments."""


def _adamw(
    gradient: Tensor, moments: list[Tensor], numbers: Tensor, betas: tuple[float, float]
) -> tuple[Tensor, list[Tensor]]:
    first = moments[0] + (1 - betas[0]) * (gradient - moments[0])
    second = betas[1] * moments[1] + (1 - betas[1]) * gradient * gradient
    root = (second / numbers[_SECOND]).sqrt() + numbers[_EPS]
    return first / numbers[_FIRST] / root, [first, second]


def _lion(
    gradient: Tensor, moments: list[Tensor], numbers: Tensor, betas: tuple[float, float]
) -> tuple[Tensor, list[Tensor]]:
    change = gradient - moments[0]
    return (moments[0] + (1 - betas[0]) * change).sign(), [moments[0] + (1 - betas[1]) * change]


def update_flat(
    rule: Rule,
    weight: Tensor,
    master: Tensor,
    gradient: Tensor,
    moments: list[Tensor],
    numbers: Tensor,
    factor: Tensor,
    skips: Tensor,
    betas: tuple[float, float],
    *,
    cautious: bool,
) -> None:
    """Steps tensors of one dimension in place: what compilation makes one kernel of."""
    update, after = rule(gradient.float() * factor, moments, numbers, betas)
    shrink = numbers[_SHRINK] * (update * master >= 0) if cautious else numbers[_SHRINK]
    stepped = torch.where(skips > 0, master, master - shrink * master - numbers[_RATE] * update)
    for moment, new in zip(moments, after, strict=True):
        moment.copy_(torch.where(skips > 0, moment, new))
    master.copy_(stepped)
    weight.copy_(stepped)


@cache
def _compiled() -> Callable[..., None]:
    return torch.compile(update_flat, dynamic=True)


class FusedStep(torch.optim.Optimizer):
    """The step of an elementwise optimizer over flat masters, whose gradients are of 16 bits.

    `weights` has the 16-bit weights of each master, which an engine registers.
    """

    rule: ClassVar["staticmethod[..., tuple[Tensor, list[Tensor]]]"]
    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.weights: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Steps every master that has a gradient, and writes its weights."""
        assert closure is None
        for group in self.param_groups:
            for master in group["params"]:
                if master.grad is not None:
                    self._step(master, group)

    def _step(self, master: Tensor, group: dict[str, Any]) -> None:
        create_moments_of(self, master)
        state = self.state[master]
        skips = torch.zeros_like(state["step"]) if self.found_inf is None else self.found_inf
        factor = torch.ones_like(skips) if self.grad_scale is None else self.grad_scale.reciprocal()
        state["step"] += 1 - skips
        decay = group.get("cautious_decay", group["weight_decay"])
        constants = [group["lr"], group["lr"] * decay, group.get("eps", 0.0), *group["betas"]]
        # In fp64, as in torch's kernels: 1 - beta2 has few digits in fp32.
        on_host = torch.tensor(constants, dtype=torch.float64, pin_memory=master.is_cuda)
        numbers = on_host.to(master.device, non_blocking=True)
        numbers[_FIRST:] = 1 - numbers[_FIRST:] ** state["step"]
        moments = [state[key] for key in moments_of(self)]
        # Detached, without the gradient of another dtype, which compilation refuses.
        flat = self.weights[master], master.detach(), master.grad, moments
        scalars = numbers.float(), factor, skips, tuple(group["betas"])
        _compiled()(type(self).rule, *flat, *scalars, cautious="cautious_decay" in group)


class FusedAdamW(FusedStep, torch.optim.AdamW):
    """AdamW; `cautious_decay` of a group is in the kernel."""

    rule = staticmethod(_adamw)


class FusedLion(FusedStep, Lion):
    """Lion; `cautious_decay` of a group is in the kernel."""

    rule = staticmethod(_lion)


def build_fused_adamw(groups: list[ParameterGroup], config: OptimConfig, device: torch.device) -> FusedAdamW:
    """Builds AdamW in one compiled kernel, with the state of `build_adamw`."""
    betas = (config.beta1, config.beta2)
    return FusedAdamW(_groups(groups, config), lr=config.lr, betas=betas, eps=config.eps)


def build_fused_lion(groups: list[ParameterGroup], config: OptimConfig, device: torch.device) -> FusedLion:
    """Builds Lion in one compiled kernel, with the state of `build_lion`."""
    betas = (config.beta1, config.beta2)
    return FusedLion(_groups(groups, config), config.lr, betas, config.weight_decay)


def _groups(groups: list[ParameterGroup], config: OptimConfig) -> list[dict[str, Any]]:
    dicts = torch_groups(groups, config)
    for group in dicts if config.cautious_decay else ():
        group["cautious_decay"] = group["weight_decay"]
    return dicts
