"""Builds the optimizer of `optim.kind` (AdamW, Adafactor, Muon); the size of its state.

Gradient clipping, skipped steps and loss scaling belong to the engine.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, compress
from typing import NamedTuple

import torch

from pretrain.config.optim import OptimConfig
from pretrain.errors import LaunchError
from pretrain.optim.groups import ParameterGroup
from pretrain.optim.matrices import WholeGroup, WholeOptimizer

# Adafactor (Shazeer and Stern 2018), the optimizer of T5.
#
# The variance of a matrix's gradient is stored as its row and column means: R + C numbers instead
# of R x C, without a first moment. The step of a matrix is relative to its own root mean square,
# so `optim.lr` is a fraction: T5's is `lr: 1e-2` under `schedule: {kind: inverse_sqrt, hold_steps:
# 10000}`, without decay. The paper and torch bound that fraction by 1 / sqrt(step): an `lr` of
# 1e-2 for more than 10,000 steps reaches the bound.

_ROOT_FLOOR = 1e-18
"""torch's epsilon 1: lower bound of the root of the variance and of the mean of the row factors.

torch's default, 1e-7, is as large as the gradients of a big model; the paper's 1e-30 becomes 0
when torch squares it.
"""


def build_adafactor(groups: list[ParameterGroup], config: OptimConfig, device: torch.device) -> WholeOptimizer:
    """Builds torch's Adafactor over all parameters.

    State after the first step: row and column variances of a matrix, all variances of a vector.
    """
    options = config.adafactor
    make = partial(
        torch.optim.Adafactor,
        lr=config.lr,
        beta2_decay=-options.decay_rate,
        eps=(_ROOT_FLOOR, options.min_scale),
        d=options.clip_threshold,
    )
    whole = []
    for group in groups:
        decay = config.weight_decay if group.decays else 0.0
        whole.append(WholeGroup(group, partial(make, weight_decay=decay), config.lr, group.lr_ratio))
    return WholeOptimizer(whole, None)


# Muon for the hidden matrices, AdamW for the rest.
#
# Muon (Jordan et al. 2024) updates a matrix by its momentum with all singular values set equal, by
# Newton-Schulz iterations in bf16. That fits a matrix between two hidden states, but not an
# embedding, an output head, a norm or a bias: these are updated by AdamW, at `optim.lr`. Fused
# weights are updated matrix by matrix (`block_rows`).

HEAD_PART = "head"
"""Part of the parameter names of the output head."""


def split_hidden(group: ParameterGroup) -> tuple[ParameterGroup, ParameterGroup]:
    """Returns the hidden matrices of a group, and the rest of it."""
    is_hidden = [
        group.decays and len(blocks[0]) == 2 and HEAD_PART not in name.split(".")
        for name, blocks in zip(group.names, group.blocks, strict=True)
    ]

    def select(name: str, chosen: Sequence[bool]) -> ParameterGroup:
        names = tuple(compress(group.names, chosen))
        parameters = tuple(compress(group.parameters, chosen))
        blocks = tuple(compress(group.blocks, chosen))
        return replace(group, name=name, names=names, parameters=parameters, blocks=blocks)

    rest = select(group.name, [not hidden for hidden in is_hidden])
    return select(group.name.replace("decay", "matrix"), is_hidden), rest


def build_muon(groups: list[ParameterGroup], config: OptimConfig, device: torch.device) -> WholeOptimizer:
    """Builds torch's Muon over the decaying matrices of the stacks, and AdamW over everything else.

    State after the first step: one momentum for each matrix, two moments for each other parameter.

    Raises:
        LaunchError: This torch has no Muon.
    """
    if not hasattr(torch.optim, "Muon"):
        raise LaunchError(
            f"optim.kind=muon needs torch 2.9 or newer, this is {torch.__version__}",
            fix="install one, or use optim.kind=adamw",
        )
    muon = config.muon
    split = [split_hidden(group) for group in groups]
    rest = [others for _, others in split if others.names]
    decay = config.weight_decay if muon.weight_decay is None else muon.weight_decay
    make = partial(
        torch.optim.Muon,
        lr=muon.lr,
        weight_decay=decay,
        momentum=muon.momentum,
        nesterov=muon.nesterov,
        ns_steps=muon.ns_steps,
        adjust_lr_fn=muon.adjust_lr_fn,
    )
    ratio = muon.lr / config.lr
    matrices = [hidden for hidden, _ in split if hidden.names]
    whole = [WholeGroup(group, make, muon.lr, ratio * group.lr_ratio) for group in matrices]
    return WholeOptimizer(whole, build_adamw(rest, config, device) if rest else None)


def build_adamw(groups: list[ParameterGroup], config: OptimConfig, device: torch.device) -> torch.optim.Optimizer:
    """Builds AdamW (Loshchilov and Hutter 2019) in one fused kernel, on CUDA and on CPU.

    State after the first step: two moments for each parameter, in its shape and dtype. Each group
    becomes one torch group, with its name under the key `name`. `device` is that of the parameters
    when the optimizer runs.
    """
    # On one CPU core the fused kernel is 3 times as fast as torch's loop for many small tensors, 8
    # times for one of 20M.
    torch_groups = [
        {
            "params": list(group.parameters),
            "weight_decay": config.weight_decay if group.decays else 0.0,
            "name": group.name,
            "lr_ratio": group.lr_ratio,
        }
        for group in groups
    ]
    return torch.optim.AdamW(
        torch_groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=device.type in ("cuda", "cpu"),
    )


# Size of the optimizer state, computed before it exists: for the disk space of checkpoints.


class StateSize(NamedTuple):
    """Numbers of fp32 elements and of tensors, without step counts; of a rank that has all."""

    elements: int
    tensors: int


def state_size(groups: Sequence[ParameterGroup], kind: str, *, averages: bool = False) -> StateSize:
    """Returns the size of the state of an `optim.kind`, and of `optim.ema`; unknown kinds count as AdamW."""
    sizes = list(_SIZES.get(kind, _adamw)(groups))
    if averages:
        sizes += _parameters(groups)
    return StateSize(sum(sizes), len(sizes))


def _shapes(group: ParameterGroup) -> Iterable[tuple[int, ...]]:
    return chain.from_iterable(group.blocks)


def _parameters(groups: Iterable[ParameterGroup]) -> list[int]:
    return [sum(map(math.prod, blocks)) for group in groups for blocks in group.blocks]


def _adamw(groups: Iterable[ParameterGroup]) -> list[int]:
    """Returns the sizes of two moments a parameter."""
    return 2 * _parameters(groups)


def _muon(groups: Iterable[ParameterGroup]) -> list[int]:
    """Returns the sizes of one momentum a hidden matrix, two moments for each other parameter."""
    split = [split_hidden(group) for group in groups]
    momenta = [math.prod(shape) for hidden, _ in split for shape in _shapes(hidden)]
    return [*momenta, *_adamw(rest for _, rest in split)]


def _adafactor(groups: Iterable[ParameterGroup]) -> list[int]:
    """Returns the sizes of a row and a column a matrix, one variance an element of a vector."""
    sizes: list[int] = []
    for group in groups:
        for shape in _shapes(group):
            sizes += shape if len(shape) == 2 else [math.prod(shape)]
    return sizes


_SIZES: dict[str, Callable[[Iterable[ParameterGroup]], list[int]]]
_SIZES = {"adamw": _adamw, "adafactor": _adafactor, "muon": _muon}

OPTIMIZERS = {"adamw": build_adamw, "adafactor": build_adafactor, "muon": build_muon}
"""Builder of each `optim.kind`: (groups, OptimConfig, device) -> torch.optim.Optimizer."""


def build_optimizer(groups: list[ParameterGroup], config: OptimConfig, device: torch.device) -> torch.optim.Optimizer:
    """Builds the optimizer of `config.kind`."""
    return OPTIMIZERS[config.kind](groups, config, device)
