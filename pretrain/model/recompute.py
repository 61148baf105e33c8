"""Activation checkpointing: what a block keeps for its backward pass, and what it computes again (Chen et al. 2016).

none        everything that autograd saves
full        the block's input; all else is computed again
selective   the block's input and the results of matrix products and attention; the cheap rest is computed again
every: n    only each n-th block is checkpointed
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_KEPT_OPERATIONS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def _policy(context: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    if operation in _KEPT_OPERATIONS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class Recompute:
    """Runs blocks under one of the modes.

    Args:
        mode: `none`, `full` or `selective`.
        every: Blocks number 0, n, 2n ... are checkpointed.
        draws_noise: Blocks have dropout, whose random numbers must come again in the second run.
    """

    def __init__(self, mode: str, every: int, *, draws_noise: bool) -> None:
        self._mode, self._every, self.draws_noise = mode, every, draws_noise

    def run(self, number: int, block: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Runs block `number` of a stack. Without gradients nothing is kept in any mode."""
        if self._mode == "none" or number % self._every or not torch.is_grad_enabled():
            return block(*arguments)
        options: dict[str, Any] = {}
        if self._mode == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=self.draws_noise, **options)
