"""SOAP (Vyas et al. 2024) over hidden matrices, AdamW for the rest."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from pretrain.config.optim import OptimConfig
from pretrain.kinds.optimizer import LONGEST_SQUARED
from pretrain.optim.groups import ParameterGroup
from pretrain.optim.matrices import WholeOptimizer
from pretrain.optim.rules import apply_decay, step_hidden


def build_soap(groups: list[ParameterGroup], config: OptimConfig, device: torch.device) -> WholeOptimizer:
    """Builds SOAP over the decaying matrices of the stacks, and AdamW over everything else.

    State after the first step: two moments for each parameter, and for each matrix two square ones
    of each side.
    """
    make = partial(
        Soap,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        shampoo_beta=config.soap.shampoo_beta,
        every=config.soap.every,
        max_side=LONGEST_SQUARED,
        cautious=config.cautious_decay,
    )
    return step_hidden(groups, config, device, lambda group: make, config.lr)


class Soap(torch.optim.Optimizer):
    """SOAP (Vyas et al. 2024, Algorithm 3): AdamW in the eigenbasis of Shampoo's factors of a matrix [R, C].

    The factors E[G G^T] and E[G^T G] are updated each step, their bases every `every` steps, by a
    power iteration and a QR decomposition (Algorithm 4). The first step fills them and leaves the
    weight. A side longer than `max_side` is not rotated (section 4). State: first moment; second
    moment in the basis; factor and basis of each side, flat, so that their shapes are not that of
    a square matrix.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        shampoo_beta: float,
        every: int,
        max_side: int,
        cautious: bool,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._shampoo_beta = shampoo_beta
        self._every = every
        self._max_side = max_side
        self._cautious = cautious

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Steps every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter.data, parameter.grad, self.state[parameter], group)

    def _step(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        if not state:
            self._create(gradient, state)
        step = int(state["step"])
        sides = {side: state[f"{side}_basis"].view(size, size) for side, size in self._sides(gradient)}
        if step:
            beta1, beta2 = group["betas"]
            moment = state["exp_avg"].lerp_(gradient, 1 - beta1)
            turned = _turn(gradient, sides)
            square = state["exp_avg_sq"].mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
            # Bias corrections count the steps that the moments have seen.
            root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
            update = _turn(_turn(moment, sides).div_(root).div_(1 - beta1**step), sides, back=True)
            apply_decay(weight, update, group["lr"] * group["weight_decay"], cautious=self._cautious)
            weight.sub_(update, alpha=group["lr"])
        self._update_factors(gradient, state, step)
        state["step"] += 1

    def _sides(self, matrix: Tensor) -> list[tuple[str, int]]:
        return [(side, size) for side, size in zip(_SIDES, matrix.shape, strict=True) if size <= self._max_side]

    def _create(self, gradient: Tensor, state: dict[str, Tensor]) -> None:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"] = torch.zeros_like(gradient)
        state["exp_avg_sq"] = torch.zeros_like(gradient)
        for side, size in self._sides(gradient):
            state[side] = gradient.new_zeros(size * size)
            state[f"{side}_basis"] = torch.eye(size, dtype=gradient.dtype, device=gradient.device).view(-1)

    def _update_factors(self, gradient: Tensor, state: dict[str, Tensor], step: int) -> None:
        for side, size in self._sides(gradient):
            matrix = gradient if side == _SIDES[0] else gradient.T
            factor = state[side].view(size, size)
            factor.lerp_(matrix @ matrix.T, 1 - self._shampoo_beta)
            basis = state[f"{side}_basis"].view(size, size)
            if step == 0:
                basis.copy_(torch.linalg.eigh(factor)[1].flip(1))
            elif step % self._every == 0:
                # Sorted by the eigenvalue that each column estimates, and the second moment with them.
                order = (basis * (factor @ basis)).sum(dim=0).argsort(descending=True)
                square = state["exp_avg_sq"]
                square.copy_(square.index_select(_SIDES.index(side), order))
                basis.copy_(torch.linalg.qr(factor @ basis[:, order])[0])


_SIDES = ("left", "right")


def _turn(matrix: Tensor, bases: dict[str, Tensor], *, back: bool = False) -> Tensor:
    """Returns L^T M R for the bases L of rows and R of columns, `back`: L M R^T; a missing one is the identity."""
    if "left" in bases:
        matrix = (bases["left"] if back else bases["left"].T) @ matrix
    if "right" in bases:
        matrix = matrix @ (bases["right"].T if back else bases["right"])
    return matrix.clone() if not bases else matrix
