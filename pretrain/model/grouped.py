"""Linear maps of rows that are sorted by expert, and moves of rows into that order and back."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from pretrain.types import Part

# A product of each run of rows with its expert's matrix. An operation of its own: to the compiler
# it is opaque and has a fixed shape, where a loop over the experts depends on the data. On one core
# of a CPU the loop is as fast as one dense product of as many rows (64 experts: within 5%), as is
# torch's grouped kernel there, which only takes rows of whole 16 bytes.


def _has_kernel(x: Tensor, weight_EOI: Tensor) -> bool:
    """Returns whether torch's grouped kernel runs: bf16 on CUDA, where a loop waits for offsets."""
    sizes = weight_EOI.shape[1:]
    is_fit = x.is_cuda and x.dtype == torch.bfloat16 and not any(size % 8 for size in sizes)
    return is_fit and hasattr(functional, "grouped_mm")


def _runs(offsets_E: Tensor) -> Iterator[tuple[int, slice]]:
    """Yields the experts that have rows, and these."""
    start = 0
    for expert, end in enumerate(offsets_E.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


@torch.library.custom_op("pretrain::grouped_linear", mutates_args=())
def grouped_linear(x_RI: Tensor, weight_EOI: Tensor, offsets_E: Tensor) -> Tensor:
    """Returns `x W_e^T` of the rows of each expert, [R, outputs]; differentiable once.

    Args:
        x_RI: Rows, sorted by expert, [R, inputs].
        weight_EOI: Matrices in the dtype of the rows, [E, outputs, inputs].
        offsets_E: int32; end of each expert's rows, which may have none.
    """
    if _has_kernel(x_RI, weight_EOI):
        return functional.grouped_mm(x_RI, weight_EOI.transpose(1, 2), offs=offsets_E)
    out_RO = x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[1])
    for expert, rows in _runs(offsets_E):
        torch.mm(x_RI[rows], weight_EOI[expert].t(), out=out_RO[rows])
    return out_RO


@grouped_linear.register_fake
def _grouped_shape(x_RI: Tensor, weight_EOI: Tensor, offsets_E: Tensor) -> Tensor:
    return x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[1])


@torch.library.custom_op("pretrain::grouped_linear_backward", mutates_args=())
def _grouped_backward(
    grad_RO: Tensor, x_RI: Tensor, weight_EOI: Tensor, offsets_E: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of rows and matrices; zeros for an expert without rows."""
    if _has_kernel(x_RI, weight_EOI):
        grad_x_RI = functional.grouped_mm(grad_RO, weight_EOI, offs=offsets_E)
        return grad_x_RI, functional.grouped_mm(grad_RO.t(), x_RI, offs=offsets_E)
    grad_x_RI = torch.empty_like(x_RI)
    grad_weight_EOI = torch.zeros_like(weight_EOI)
    for expert, rows in _runs(offsets_E):
        torch.mm(grad_RO[rows], weight_EOI[expert], out=grad_x_RI[rows])
        torch.mm(grad_RO[rows].t(), x_RI[rows], out=grad_weight_EOI[expert])
    return grad_x_RI, grad_weight_EOI


@_grouped_backward.register_fake
def _backward_shapes(
    grad_RO: Tensor, x_RI: Tensor, weight_EOI: Tensor, offsets_E: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(x_RI), torch.empty_like(weight_EOI)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad_RO: Tensor) -> tuple[Tensor, Tensor, None]:
    x_RI, weight_EOI, offsets_E = ctx.saved_tensors
    return *_grouped_backward(grad_RO.contiguous(), x_RI, weight_EOI, offsets_E), None


grouped_linear.register_autograd(_differentiate, setup_context=_save)


class GroupedLinear(nn.Module):
    """A linear map for each expert, with their matrices in one parameter, [E, outputs, inputs].

    Their biases are one vector, [E outputs]: of one dimension, as any bias that is no matrix to an
    optimizer. With experts over ranks both are the `part` of this rank, and say so (`part_of`).
    """

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(experts * outputs)) if bias else None
        self.part = Part()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GroupedLinear":
        super()._apply(fn, recurse)
        for parameter in self.parameters() if self.part.ranks > 1 else ():
            parameter.part = self.part  # `to_empty` makes other parameters
        return self

    def forward(self, x_RI: Tensor, offsets_E: Tensor) -> Tensor:
        """Maps rows that are sorted by expert, in autocast's dtype where it is on."""
        device = x_RI.device.type
        dtype = x_RI.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        out_RO = grouped_linear(x_RI.to(dtype), self.weight.to(dtype), offsets_E)
        if self.bias is None:
            return out_RO
        rows_R = torch.arange(len(out_RO), dtype=offsets_E.dtype, device=offsets_E.device)
        experts_R = torch.searchsorted(offsets_E, rows_R, right=True)
        return out_RO + self.bias.to(dtype).view(len(offsets_E), -1).index_select(0, experts_R)


def sort_by_expert(of_expert_R: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the places of rows sorted by expert, in their order, and the places back, int64 [R]."""
    order_R = of_expert_R.argsort(stable=True)
    places_R = torch.arange(len(order_R), device=order_R.device)
    return order_R, torch.empty_like(order_R).scatter_(0, order_R, places_R)


class Take(torch.autograd.Function):
    """Row `index_R[i] // copies` at place i; its gradient is a gather too: sums have one order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index_R: Tensor, inverse_R: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse_R)
        ctx.copies = copies
        return x.index_select(0, index_R // copies if copies > 1 else index_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Gathers the gradient of each row; sums those of its copies."""
        (inverse_R,) = ctx.saved_tensors
        rows = grad.index_select(0, inverse_R)
        if ctx.copies > 1:
            rows = rows.unflatten(0, (-1, ctx.copies)).sum(1)
        return rows, None, None, None
