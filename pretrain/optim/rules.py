"""Update rules that torch lacks, as torch optimizers: Muon by batches, NorMuon, Lion, SOAP, and cautious weight decay.

    BatchedMuon       matrices                torch's Muon by batches; rows of its update normalised, decay cautious
    Soap              matrices                AdamW in the eigenbasis of Shampoo's factors
    Lion              any tensor              sign of an interpolated momentum
    decay_cautiously  before AdamW's step     the decay that its fused kernel would apply everywhere

Rules of matrices run in `WholeOptimizer` (`matrices.py`), which gives them each matrix whole.
Cautious decay (Chen et al. 2025, Algorithm 1) shrinks a weight where its update has the sign of
the weight, and shrinks it too.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


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
                _decay(parameter, update, shrink, cautious=True)


def _decay(weight: Tensor, update: Tensor, shrink: float, *, cautious: bool) -> None:
    """Shrinks a weight in place by `shrink` times itself; `cautious`: where the update, to be subtracted, agrees."""
    if cautious:
        weight.sub_(weight * (update * weight >= 0), alpha=shrink)
    else:
        weight.mul_(1 - shrink)


class BatchedMuon(torch.optim.Muon):
    """torch's Muon in batches of matrices of one shape, with NorMuon's rows or cautious decay if asked for.

    NorMuon (Li et al. 2025, Algorithm 1) divides each row of the orthogonalised update by the root
    of a running mean of its squares (`beta2`), and keeps the norm of the whole, so that the rates
    of `adjust_lr_fn` hold. State: torch's momentum, and with `beta2` one number a row, [R, 1].

    On a GPU, matrices of one shape are orthogonalised by batched products: 3 launches an iteration
    for all, equal to torch's up to the rounding of another kernel. On a CPU, where that
    gains little, one at a time, with products in bf16 bit for bit as torch does.

    Args:
        params: Matrices [R, C].
        beta2: Decay of NorMuon's mean squares; None: rows are not divided.
        cautious: Decay only where the update has the sign of the weight.
        batch_elements: Elements of a batch at most, but one matrix at least; a step has four
            tensors of that size beside it. 0: one matrix at a time.
        products: dtype of the Newton-Schulz iterations.
        options: Those of torch's Muon.
    """

    def __init__(
        self,
        params: Any,
        *,
        beta2: float | None = None,
        cautious: bool = False,
        batch_elements: int = 0,
        products: torch.dtype = torch.bfloat16,
        **options: Any,
    ) -> None:
        super().__init__(params, **options)
        self._beta2 = beta2
        self._cautious = cautious
        self._batch_elements = batch_elements
        self._products = products

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Steps every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape].append(parameter)
            for shape, parameters in alike.items():
                size = max(1, self._batch_elements // shape.numel())
                for start in range(0, len(parameters), size):
                    self._step_batch(parameters[start : start + size], group)

    def _step_batch(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        updates = _orthogonalize(self._directions(parameters, group), group, self._products)
        ratio = _rate_ratio(group["adjust_lr_fn"], *parameters[0].shape)
        rate, decay = group["lr"], group["weight_decay"]
        for parameter, update in zip(parameters, updates, strict=True):
            weight = parameter.data
            if self._beta2 is None and not self._cautious:
                _decay(weight, update, rate * decay, cautious=False)
                weight.add_(update, alpha=-rate * ratio)
                continue
            # In the order of the weight: a tall matrix comes transposed, and its norm would round otherwise.
            update = torch.zeros_like(weight).add_(update, alpha=ratio)
            if self._beta2 is not None:
                update = self._normalize(self.state[parameter], update, self._beta2)
            _decay(weight, update, rate * decay, cautious=self._cautious)
            weight.sub_(update, alpha=rate)

    def _directions(self, parameters: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Adds the gradients to the momenta; returns what is to be orthogonalised."""
        gradients = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if "momentum_buffer" not in self.state[parameter]:
                zeros = torch.zeros_like(gradient, memory_format=torch.preserve_format)
                self.state[parameter]["momentum_buffer"] = zeros
        momenta = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        return torch._foreach_lerp(gradients, momenta, group["momentum"]) if group["nesterov"] else momenta

    def _normalize(self, state: dict[str, Tensor], update: Tensor, beta2: float) -> Tensor:
        square = update.square().mean(dim=1, keepdim=True)
        if "row_square" not in state:
            state["row_square"] = torch.zeros_like(square)
        rows = update / (state["row_square"].lerp_(square, 1 - beta2).sqrt() + _TINY)
        return rows * (update.norm() / (rows.norm() + _TINY))


def fast_product_dtype(device: torch.device) -> torch.dtype:
    """Returns bf16 where a device multiplies in it fast, else fp32: most CPUs emulate bf16.

    By the processor's flags, not by a measurement, so that a resumed run computes the same bits.
    """
    # Older releases of torch have no such function.
    flags: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    has_bf16 = device.type != "cpu" or any(flags.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return torch.bfloat16 if has_bf16 else torch.float32


_TINY = 1e-10
"""Against a division by zero, as in the code of NorMuon."""


def _orthogonalize(
    matrices: list[Tensor],
    group: dict[str, Any],
    dtype: torch.dtype,
) -> Sequence[Tensor]:
    """Sets the singular values of matrices of one shape [R, C] about equal to 1, by products in `dtype`.

    Newton-Schulz iterations with torch's coefficients, on the smaller side's products.
    """
    # One matrix: as torch does, by products of matrices, which round otherwise than batched ones.
    is_batch = len(matrices) > 1
    if is_batch:
        x = torch.empty(len(matrices), *matrices[0].shape, dtype=dtype, device=matrices[0].device)
        torch._foreach_copy_(list(x.unbind()), matrices)
        multiply_add = torch.baddbmm
    else:
        x = matrices[0].to(dtype, copy=True)
        multiply_add = torch.addmm
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    norms = x.norm(dim=(-2, -1), keepdim=True) if is_batch else x.norm()
    x.div_(norms.clamp(min=group["eps"]))
    a, b, c = group["ns_coefficients"]
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    if is_tall:
        x = x.mT
    return x.unbind() if is_batch else [x]


def _rate_ratio(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """Returns the factor of a matrix's learning rate, as torch's Muon defines it by `adjust_lr_fn`."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


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
                _decay(weight, update, group["lr"] * group["weight_decay"], cautious=self._cautious)
            torch._foreach_add_(weights, updates, alpha=-group["lr"])
            torch._foreach_lerp_(moments, gradients, 1 - beta2)


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
            _decay(weight, update, group["lr"] * group["weight_decay"], cautious=self._cautious)
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
