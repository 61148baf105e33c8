"""fp32 masters of 16-bit working weights, in one flat tensor for each group of the optimizer.

    working weights [bf16]   the parameters of the module, views of one flat tensor a group
    gradients [bf16]         of the parameters, summed over micro-batches and ranks as at ZeRO 1
    masters [fp32]           what the optimizer steps, and what a checkpoint has

    take_gradients  ->  the optimizer steps the masters  ->  write_weights

The layout is ZeRO 1's of one rank, and so is the arithmetic. A long tensor is one kernel to every
operation, however many parameters a model has. Not here: the norm, clipping and skipped steps
(`replicated.py`).
"""

from collections.abc import Iterator
from functools import partial
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pretrain.optim.fused import FusedStep
from pretrain.optim.matrices import Span, WeightPiece

_ALIGNED = 64
"""Elements at whose multiples parameters begin: products are fastest on multiples of 128 bytes."""


class _Group(NamedTuple):
    """A group of the optimizer: its parameters, and the elements of each and of its padding."""

    parameters: list[nn.Parameter]
    sizes: list[int]
    working: Tensor
    master: Tensor

    def parts(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Returns views of a flat tensor: of each parameter, in its shape, and of the padding."""
        views = flat.split(self.sizes)
        shaped = [view.view(p.shape) for view, p in zip(views[::2], self.parameters, strict=True)]
        return shaped, [view for view in views[1::2] if view.numel()]


class FlatMasters:
    """Makes the parameters of a module 16 bits, and has its optimizer step fp32 masters of them.

    Frozen parameters are converted, and have no master. `names` are those in checkpoints, by
    `id(parameter)`.
    """

    def __init__(
        self,
        module: nn.Module,
        names: dict[int, str],
        optimizer: torch.optim.Optimizer,
        dtype: torch.dtype,
    ) -> None:
        groups = [group for group in optimizer.param_groups if group["params"]]
        self._groups = [_flatten(group, dtype) for group in groups]
        self.tensors = [group.master for group in self._groups]
        self.pieces = [
            WeightPiece(Span(names[id(p)], slot, 0, start, p.numel()), tuple(p.shape), group.master)
            for slot, group in enumerate(self._groups)
            for p, start in zip(group.parameters, _starts(group.sizes), strict=True)
        ]
        self._is_fused = isinstance(optimizer, FusedStep)
        if isinstance(optimizer, FusedStep):
            for group in self._groups:
                group.master.grad_dtype = dtype
                optimizer.weights[group.master] = group.working
        for parameter in module.parameters():
            if not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Moves the gradients of the parameters to the masters, in fp32 unless a step is fused.

        Those of a parameter without a gradient are zeros, as under ZeRO.
        """
        for group in self._groups:
            like = group.working if self._is_fused else group.master
            group.master.grad = torch.empty_like(like)
            places, blank = group.parts(group.master.grad)
            targets, gradients = [], []
            for place, parameter in zip(places, group.parameters, strict=True):
                if parameter.grad is None:
                    blank.append(place)
                else:
                    targets.append(place)
                    gradients.append(parameter.grad)
                    parameter.grad = None
            if targets:
                torch._foreach_copy_(targets, gradients)
            if blank:
                torch._foreach_zero_(blank)

    def norm(self) -> Tensor:
        """Returns the norm of the gradients that were taken, fp32 []; summed in fp64, as ZeRO's."""
        exact = partial(torch.linalg.vector_norm, dtype=torch.float64)
        norms = [exact(master.grad) for master in self.tensors]
        return torch.stack(norms).square().float().sqrt().norm()

    def write_weights(self) -> None:
        """Makes the working weights follow the masters."""
        for group in self._groups:
            group.working.copy_(group.master)


def _starts(sizes: list[int]) -> Iterator[int]:
    """Returns the first element of each parameter; `sizes`: of it and its padding in turn."""
    return islice(accumulate(sizes, initial=0), 0, len(sizes), 2)


@torch.no_grad()
def _flatten(group: dict[str, Any], dtype: torch.dtype) -> _Group:
    """Moves the parameters of a group into flat tensors, one by one; the optimizer steps one of them."""
    parameters = list(group["params"])
    sizes = [size for p in parameters for size in (p.numel(), -p.numel() % _ALIGNED)]
    master = torch.zeros(sum(sizes), dtype=torch.float32, device=parameters[0].device)
    flat = _Group(parameters, sizes, torch.zeros_like(master, dtype=dtype), master)
    places = zip(parameters, flat.parts(master)[0], flat.parts(flat.working)[0], strict=True)
    for parameter, exact, working in places:
        working.copy_(parameter)
        exact.copy_(working)  # rounded, as ZeRO's: a run begins with the same weights under each
        parameter.data = working
    group["params"] = [master]
    return flat
