"""Makes a DeepSpeed optimizer throw a step's gradient away: its own way out for a gradient that is not finite.

    ZeRO 1, 2         the norm of the gradient is said to be infinite
    ZeRO 3            the norms of its groups are
    stage 0, bf16     the check for overflow is said to have found one

Weights and moments stay, buffers are cleared, and no collective is left half-way: every rank drops the same step. The
loss scale of fp16, which would be halved, is put back.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from pretrain.engine.loss_scale import read_loss_scale, set_loss_scale

INFINITE = float("inf")


@contextlib.contextmanager
def dropping(optimizer: Any) -> Iterator[None]:
    """Within, the next step of `DeepSpeedEngine.optimizer` changes nothing."""
    scale = read_loss_scale(optimizer)
    owner, name, answer = _way_out(optimizer)
    setattr(owner, name, lambda *arguments, **named: answer)
    try:
        yield
    finally:
        delattr(owner, name)  # the class's own shows again
        set_loss_scale(optimizer, scale)


def _way_out(optimizer: Any) -> tuple[Any, str, Any]:
    """Returns whose method decides that a gradient is not finite, its name, and the answer that says so."""
    if hasattr(optimizer, "overflow_checker"):
        return optimizer.overflow_checker, "has_overflow", True
    if hasattr(optimizer, "_get_norm_groups"):
        return optimizer, "_get_norm_groups", [INFINITE]
    return optimizer, "scaled_global_norm", INFINITE
