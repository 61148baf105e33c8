"""Builds the optimizer of `optim.kind`; the size of its state, for the disk space of checkpoints."""

from collections.abc import Sequence
from itertools import chain
from math import prod
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretrain.config.optim import OptimConfig
from pretrain.kinds.optimizer import ADAM_MOMENTS, Optimizer
from pretrain.optim.groups import ParameterGroup, split_hidden


class StateSize(NamedTuple):
    """Numbers of fp32 elements and of tensors, without step counts; of a rank that has all."""

    elements: int
    tensors: int


Blocks = Sequence[tuple[tuple[int, ...], ...]]
"""Shapes of the matrices of each parameter."""


def _split(group: ParameterGroup, optimizer: Optimizer) -> tuple[Blocks, Blocks]:
    if optimizer.matrices is None:
        return (), group.blocks
    if not optimizer.moments:
        return group.blocks, ()
    hidden, rest = split_hidden(group)
    return hidden.blocks, rest.blocks


def state_size(groups: Sequence[ParameterGroup], config: OptimConfig) -> StateSize:
    """Returns the size that the state of an optimizer will have, with `optim.ema`."""
    optimizer = config.record
    sizes: list[int] = []
    for group in groups:
        whole, elementwise = _split(group, optimizer)
        if optimizer.matrices is not None:
            state = optimizer.matrices(config.own)
            sizes += chain.from_iterable(map(state.sizes, chain.from_iterable(whole)))
        sizes += _elements(elementwise) * len(optimizer.moments)
        if config.ema.is_on:
            sizes += _elements(group.blocks)
    return StateSize(sum(sizes), len(sizes))


def _elements(parameters: Blocks) -> list[int]:
    return [sum(map(prod, blocks)) for blocks in parameters]


def build_optimizer(
    groups: list[ParameterGroup], config: OptimConfig, device: torch.device, *, fuses: bool = False
) -> torch.optim.Optimizer:
    """Builds the optimizer of `config.kind`; `moments_of` knows its state before the first step.

    `fuses`: an engine has flat masters, which one compiled kernel may step (`fused.py`).
    """
    can_fuse = fuses and hasattr(torch.Tensor, "grad_dtype")  # from torch 2.10 on
    build = config.record.fused if can_fuse and config.record.fused else config.record.build
    optimizer: Any = resolve_name(build)(groups, config, device)
    optimizer.moments = config.record.moments
    return optimizer


def moments_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Returns the state tensors of what an optimizer steps elementwise, in the shape of the parameter."""
    moments: tuple[str, ...] = getattr(optimizer, "moments", ADAM_MOMENTS)
    return moments


def create_moments_of(optimizer: torch.optim.Optimizer, master: Tensor) -> None:
    """Creates the state of the optimizer's first step: zeros, and a step count of 0."""
    state = optimizer.state[master]
    if not state:
        # Fused kernels need the count on the device of the parameter.
        state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
        for key in moments_of(optimizer):
            state[key] = torch.zeros_like(master, memory_format=torch.preserve_format)
