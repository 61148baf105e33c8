"""Attention sinks: a learned score of each head that takes weight and has no value (gpt-oss, as released).

    L   log sum exp of the scores that a query sees        L' = log(exp L + exp sink)
    o' = exp(L - L') o                                     o: of a kernel, which knows no sink

The sink is one more key of every query, under any mask, window and document. The
gradients of queries, keys and values are those that the backward pass of the kernel computes if it
is given o' and L' in the place of o and L: its weights are then exp(score - L'), and the product of
the result and its gradient is that of o'. The gradient of the sink is -exp(sink - L') (o' . d o').

Not here: `eager`, which has a column for the sink, and `flex`, whose L is differentiable.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

_LSE_TILE = 32
"""The memory-efficient kernel writes L for a multiple of so many queries."""

_MASK_TILE = 16
"""It reads masks whose rows begin at a multiple of so many elements."""


class LseKernel(NamedTuple):
    """A kernel that returns its log-sum-exp.

    `run(q, k, v)` returns the result, L, which has its shape without the last dimension, and what
    else the backward pass needs; `undo(grad, q, k, v, result, L, *else)` returns the gradients.
    """

    run: Callable[..., tuple[Tensor, Tensor, tuple[Tensor, ...]]]
    undo: Callable[..., tuple[Tensor, Tensor, Tensor]]


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: LseKernel) -> Tensor:
        result, lse, rest = kernel.run(q, k, v)
        whole = torch.logaddexp(lse, sinks)
        scaled = result * (lse - whole).exp()[..., None]
        # No `to` that returns its input: torch 2.11 compiles a function with two names for what it
        # returns to wrong gradients (pytorch issue 180642).
        result = scaled if scaled.dtype == result.dtype else scaled.to(result.dtype)
        ctx.save_for_backward(q, k, v, sinks, result, whole, *rest)
        ctx.kernel = kernel
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, result, whole, *rest = ctx.saved_tensors
        grads = ctx.kernel.undo(grad, q, k, v, result, whole, *rest)
        products = (grad.to(whole.dtype) * result).sum(dim=-1)
        grad_sinks = (sinks - whole).exp().mul_(products).neg_().sum_to_size(sinks.shape)
        return *grads, grad_sinks, None


def attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: LseKernel) -> Tensor:
    """Attends by a kernel, with sinks broadcastable to its log-sum-exp."""
    exact = torch.promote_types(sinks.dtype, torch.float32)
    return _SinkAttention.apply(q, k, v, sinks.to(exact), kernel)


def sdpa_kernel_of(
    device: torch.device, allowed: Tensor | None, *, is_causal: bool, scale: float | None
) -> LseKernel:  # fmt: skip
    """Returns torch's kernel for [B, heads, T, H]: flash on a CPU, memory-efficient on a GPU.

    `allowed`: bool, broadcastable to [B, heads, T, S]. On a GPU as many key-value heads as queries.
    """
    aten = torch.ops.aten
    if device.type == "cpu":
        forward, backward = (
            aten._scaled_dot_product_flash_attention_for_cpu,
            aten._scaled_dot_product_flash_attention_for_cpu_backward,
        )

        def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
            added = _addend(allowed, q)
            return *forward(q, k, v, 0.0, is_causal, attn_mask=added, scale=scale), ()

        def undo(grad: Tensor, q: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            added = _addend(allowed, q)
            return backward(grad, q, *saved, 0.0, is_causal, attn_mask=added, scale=scale)

        return LseKernel(run, undo)

    def run_gpu(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        added = _aligned(allowed, q, k)
        call = aten._scaled_dot_product_efficient_attention
        result, lse, *state = call(q, k, v, added, True, 0.0, is_causal, scale=scale)
        return result, lse[..., : q.shape[2]], tuple(state)

    def undo_gpu(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor, lse: Tensor, *state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse = pad(lse, (0, -lse.shape[2] % _LSE_TILE), value=torch.inf)
        call = aten._scaled_dot_product_efficient_attention_backward
        saved = (grad, q, k, v, _aligned(allowed, q, k), result, lse, *state)
        *grads, _ = call(*saved, 0.0, [True, True, True, False], is_causal, scale=scale)
        return tuple(grads)

    return LseKernel(run_gpu, undo_gpu)


def _addend(allowed: Tensor | None, q: Tensor) -> Tensor | None:
    if allowed is None:
        return None
    return q.new_zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)


def _aligned(allowed: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    if allowed is None:
        return None
    added, keys = _addend(allowed, q), k.shape[2]
    assert added is not None
    added = pad(added.expand(*added.shape[:-1], keys), (0, -keys % _MASK_TILE))
    return added[..., :keys].expand(*q.shape[:3], keys)
