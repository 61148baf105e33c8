"""Muon (Jordan et al. 2024) by batches, with NorMuon's rows and cautious decay, over hidden matrices.

Muon updates a matrix by its momentum with all singular values set equal, by Newton-Schulz
iterations in bf16 (fp32 on most CPUs). That fits a matrix between two hidden states, but not an
embedding, an output head, a norm or a bias: these are updated by AdamW, at `optim.lr`. So is a
router, the head of a choice among experts. Fused weights are updated matrix by matrix, and those of
experts expert by expert (`block_rows`).
"""

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pretrain.config.optim import OptimConfig
from pretrain.errors import LaunchError
from pretrain.optim.groups import ParameterGroup
from pretrain.optim.matrices import WholeOptimizer
from pretrain.optim.rules import apply_decay, step_hidden

log = logging.getLogger(__name__)

MUON_BATCH_ELEMENTS = {"cuda": 2**25}
"""Elements of the matrices that a kind of device orthogonalises at once: four bf16 tensors of 64 MiB at most."""


def build_muon(groups: list[ParameterGroup], config: OptimConfig, device: torch.device) -> WholeOptimizer:
    """Builds Muon over the decaying matrices of the stacks, and AdamW over everything else.

    State after the first step: one momentum for each matrix, two moments for each other parameter;
    with `row_beta2` also one number for each row of a matrix.

    Raises:
        LaunchError: This torch has no Muon.
    """
    if not hasattr(torch.optim, "Muon"):
        raise LaunchError(
            f"optim.kind=muon needs torch 2.9 or newer, this is {torch.__version__}",
            fix="install one, or use optim.kind=adamw",
        )
    muon = config.muon
    decay = config.weight_decay if muon.weight_decay is None else muon.weight_decay
    products = fast_product_dtype(device)
    log.info("Muon: products in %s on this %s", "bf16" if products is torch.bfloat16 else "fp32", device.type)
    make = partial(
        BatchedMuon,
        beta2=muon.row_beta2,
        cautious=config.cautious_decay,
        batch_elements=MUON_BATCH_ELEMENTS.get(device.type, 0),
        products=products,
        lr=muon.lr,
        momentum=muon.momentum,
        nesterov=muon.nesterov,
        ns_steps=muon.ns_steps,
        adjust_lr_fn=muon.adjust_lr_fn,
    )
    return step_hidden(
        groups, config, device, lambda group: partial(make, weight_decay=decay / group.scale.lr), muon.lr
    )


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
                apply_decay(weight, update, rate * decay, cautious=False)
                weight.add_(update, alpha=-rate * ratio)
                continue
            # In the order of the weight: a tall matrix comes transposed, and its norm would round otherwise.
            update = torch.zeros_like(weight).add_(update, alpha=ratio)
            if self._beta2 is not None:
                update = self._normalize(self.state[parameter], update, self._beta2)
            apply_decay(weight, update, rate * decay, cautious=self._cautious)
            weight.sub_(update, alpha=rate)

    def _directions(self, parameters: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
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
