"""The dynamic loss scale of fp16 (Micikevicius et al. 2018, 3.2), for checkpoints.

DeepSpeed's scaler is a few numbers, the same on every rank and at ZeRO 1, 2 and 3. Without them, a run that goes on
would meet the overflows of its first steps again.
"""

from typing import Any

FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Of DeepSpeed's DynamicLossScaler."""


def _scaler(optimizer: Any) -> Any:
    scaler = getattr(optimizer, "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None


def read_loss_scale(optimizer: Any) -> dict[str, float]:
    """Returns the state of the scale of a DeepSpeed optimizer; empty where it is fixed."""
    scaler = _scaler(optimizer)
    return {} if scaler is None else {f"loss_scale.{name}": getattr(scaler, name) for name in FIELDS}


def set_loss_scale(optimizer: Any, values: dict[str, float]) -> None:
    """Sets what `read_loss_scale` returned; nothing where the scale is fixed, or was."""
    scaler = _scaler(optimizer)
    if scaler is not None:
        for name in FIELDS:
            setattr(scaler, name, values.get(f"loss_scale.{name}", getattr(scaler, name)))


def never_raise(optimizer: Any) -> None:
    """At the least scale DeepSpeed raises an exception of no type; without it such a step is skipped like others, and
    `optim.max_bad_steps` of them end the run."""
    scaler = _scaler(optimizer)
    if scaler is not None:
        scaler.raise_error_at_min_scale = False
