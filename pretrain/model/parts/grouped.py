"""Linear maps of rows that are sorted by expert, and moves of rows into that order and back."""

import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from pretrain.parts import Part

# A product of each run of rows with its expert's matrix. An operation of its own: to the compiler
# it is opaque and has a fixed shape, where a loop over the experts depends on the data. On a CPU
# torch's grouped kernel is such a loop too, over `torch.mm`.

LEAST_PRODUCTS = 2**19
"""Multiplications of a run of rows from which oneDNN, with a copy of its result, is faster."""

LEAST_OUTER_PRODUCTS = 2**21
"""The same of gradients of matrices, whose result is the larger one."""


def _has_kernel(x: Tensor, weight_EOI: Tensor) -> bool:
    """Returns whether torch's grouped kernel runs: bf16 on CUDA, where a loop waits for offsets."""
    sizes = weight_EOI.shape[1:]
    has_rows = x.shape[0] > 0  # a rank may be sent none
    is_fit = has_rows and x.is_cuda and x.dtype == torch.bfloat16 and not any(size % 8 for size in sizes)
    return is_fit and hasattr(functional, "grouped_mm")


def _runs(offsets_E: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yields the experts that have rows, and the first and the end of these."""
    start = 0
    for expert, end in enumerate(offsets_E.tolist()):
        if end > start:
            yield expert, start, end
        start = end


@cache
def _is_zen5() -> bool:
    """Returns whether the processor is one of AMD with units of 512 bits: from family 26 on."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    family = re.search(r"^cpu family\s*: (\d+)", text, re.MULTILINE)
    return "AuthenticAMD" in text and family is not None and int(family[1]) >= 26


def _has_onednn(x: Tensor) -> bool:
    """Returns whether oneDNN multiplies: fp32 on a CPU of AMD, from Zen 5 on.

    `torch.mm` calls MKL: half as fast as oneDNN on one core of Zen 5, as fast on one of Zen 4,
    faster by a tenth to a half on one of an Intel Xeon (benchmarks/results.md).
    """
    if x.device.type != "cpu" or x.dtype != torch.float32 or not torch.backends.mkldnn.enabled:
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and _is_zen5()


def _round_rows(rows: int) -> int:
    """Returns so many rows or up to an eighth less, of few different numbers.

    oneDNN compiles a kernel for each shape (0.5 ms), and the lengths of runs never repeat.
    """
    step = max(8, 1 << max(0, rows.bit_length() - 4))
    return rows // step * step


def _multiply_onednn(x_RI: Tensor, weight_OI: Tensor) -> Tensor:
    # What `torch.compile` calls for a linear layer: no public function runs this kernel in fp32.
    return torch.ops.mkldnn._linear_pointwise(x_RI, weight_OI, None, "none", [], "")


def _multiply_runs(x_RI: Tensor, weight_EIO: Tensor, offsets_E: Tensor) -> Tensor:
    """Returns `x W_e` of the rows of each expert, [R, outputs], without gradients."""
    out_RO = x_RI.new_empty(x_RI.shape[0], weight_EIO.shape[2])
    # Rows of the neighbours fill up a kernel's number of rows; their results are thrown away.
    least = LEAST_PRODUCTS / weight_EIO[0].numel() if _has_onednn(x_RI) else math.inf
    total = x_RI.shape[0]
    # Views of all experts at once: made one by one they would cost a tenth of small products.
    weights_IO, weights_OI = weight_EIO.unbind(0), weight_EIO.transpose(1, 2).unbind(0)
    for expert, start, end in _runs(offsets_E):
        filled = -_round_rows(start - end)  # rounded up
        if end - start < least or filled > total:
            torch.mm(x_RI[start:end], weights_IO[expert], out=out_RO[start:end])
            continue
        first = min(start, total - filled)
        made = _multiply_onednn(x_RI[first : first + filled], weights_OI[expert])
        out_RO[start:end] = made[start - first : end - first]
    return out_RO


def _multiply_outer(grad_RO: Tensor, x_RI: Tensor, offsets_E: Tensor) -> Tensor:
    """Returns `grad^T x` of the rows of each expert, [E, outputs, inputs]; zeros without rows."""
    out_EOI = x_RI.new_empty(len(offsets_E), grad_RO.shape[1], x_RI.shape[1])
    # Experts without rows. The rest is written once: memory that is new costs as much as a product.
    has_rows_E = torch.diff(offsets_E, prepend=offsets_E.new_zeros(1)) > 0
    for expert in (~has_rows_E).nonzero().flatten().tolist():
        out_EOI[expert].zero_()
    least = LEAST_OUTER_PRODUCTS / out_EOI[0].numel() if _has_onednn(x_RI) else math.inf
    grad_OR, x_IR, outs_OI = grad_RO.t(), x_RI.t(), out_EOI.unbind(0)
    for expert, start, end in _runs(offsets_E):
        out_OI = outs_OI[expert]
        middle = start + (_round_rows(end - start) if end - start >= least else 0)
        if middle > start:
            out_OI.copy_(_multiply_onednn(grad_OR[:, start:middle], x_IR[:, start:middle]))
        if middle < end:
            beta = 1 if middle > start else 0
            torch.addmm(out_OI, grad_OR[:, middle:end], x_RI[middle:end], beta=beta, out=out_OI)
    return out_EOI


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
    return _multiply_runs(x_RI, weight_EOI.transpose(1, 2), offsets_E)


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
    grad_x_RI = _multiply_runs(grad_RO, weight_EOI, offsets_E)
    return grad_x_RI, _multiply_outer(grad_RO, x_RI, offsets_E)


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


def _sum_rows(x: Tensor, index_PJ: Tensor, weights_PJ: Tensor | None = None) -> Tensor:
    """Returns `sum_j w_pj x[index_pj]`, in one pass without the rows in between."""
    return functional.embedding_bag(index_PJ, x, mode="sum", per_sample_weights=weights_PJ)


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
        """Gathers the gradient of each row; sums over its copies."""
        (inverse_R,) = ctx.saved_tensors
        if ctx.copies == 1:
            return grad.index_select(0, inverse_R), None, None, None
        return _sum_rows(grad, inverse_R.view(-1, ctx.copies)), None, None, None


class Combine(torch.autograd.Function):
    """`sum_j w_pj x[inverse_pj]`, the weighted sum of the J results of each token, [P, D].

    Args of `apply`: results [R, D] sorted by expert; weights [P, J] in their dtype; and the places
    of `sort_by_expert`.
    """

    @staticmethod
    def forward(
        ctx: Any, x_RD: Tensor, weights_PJ: Tensor, order_R: Tensor, inverse_R: Tensor
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x_RD, weights_PJ, order_R, inverse_R)
        return _sum_rows(x_RD, inverse_R.view_as(weights_PJ), weights_PJ)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Returns the gradients of results and weights."""
        x_RD, weights_PJ, order_R, inverse_R = ctx.saved_tensors
        tokens, copies = weights_PJ.shape
        grad_RD = grad_PD.index_select(0, order_R // copies)
        if grad_PD.device.type == "cpu":
            # The products of `embedding_bag`: those of `bmm` cost eight times as much on a CPU. On
            # CUDA torch 2.11 has the former for no bf16.
            of_token_R = torch.arange(tokens * copies) // copies
            starts_P = torch.arange(0, tokens * copies, copies)
            products_R = torch.ops.aten._embedding_bag_per_sample_weights_backward(
                grad_PD, x_RD, inverse_R, starts_P, of_token_R, 0, -1
            )
        else:
            products_R = torch.bmm(grad_RD[:, None], x_RD[..., None]).flatten().index_select(0, inverse_R)
        grad_RD.mul_(weights_PJ.flatten().index_select(0, order_R)[:, None])
        return grad_RD, products_R.view_as(weights_PJ), None, None
