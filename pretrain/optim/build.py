"""Builds the optimizer of `optim.kind` (AdamW, Adafactor, Lion, Muon, SOAP); the size of its state.

Gradient clipping, skipped steps and loss scaling belong to the engine.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, compress
from typing import Any, NamedTuple

import torch

from pretrain.config.optim import SOAP_MAX_SIDE, OptimConfig
from pretrain.errors import LaunchError
from pretrain.optim.groups import ParameterGroup
from pretrain.optim.matrices import WholeGroup, WholeOptimizer
from pretrain.optim.rules import BatchedMuon, Lion, Soap, decay_cautiously, fast_product_dtype

log = logging.getLogger(__name__)

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
# Newton-Schulz iterations in bf16 (fp32 on most CPUs). That fits a matrix between two hidden
# states, but not an embedding, an output head, a norm or a bias: these are updated by AdamW, at
# `optim.lr`. So is a router, the head of a choice among experts. Fused weights are updated matrix
# by matrix, and those of experts expert by expert (`block_rows`).

MUON_BATCH_ELEMENTS = {"cuda": 2**25}
"""Elements of the matrices that a kind of device orthogonalises at once: four bf16 tensors of 64 MiB at most."""

HEAD_PARTS = frozenset({"head", "router"})
"""Parts of the parameter names of heads."""


def split_hidden(group: ParameterGroup) -> tuple[ParameterGroup, ParameterGroup]:
    """Returns the hidden matrices of a group, and the rest of it."""
    is_hidden = [
        group.decays and len(blocks[0]) == 2 and HEAD_PARTS.isdisjoint(name.split("."))
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
    split = [split_hidden(group) for group in groups]
    rest = [others for _, others in split if others.names]
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
    ratio = muon.lr / config.lr
    matrices = [hidden for hidden, _ in split if hidden.names]
    whole = [
        WholeGroup(group, partial(make, weight_decay=decay / group.scale.lr), muon.lr, ratio * group.lr_ratio)
        for group in matrices
    ]
    return WholeOptimizer(whole, build_adamw(rest, config, device) if rest else None)


def build_soap(groups: list[ParameterGroup], config: OptimConfig, device: torch.device) -> WholeOptimizer:
    """Builds SOAP over the decaying matrices of the stacks, and AdamW over everything else.

    State after the first step: two moments for each parameter, and for each matrix two square ones
    of each side.
    """
    split = [split_hidden(group) for group in groups]
    whole = [
        WholeGroup(
            hidden,
            partial(
                Soap,
                lr=config.lr,
                betas=(config.beta1, config.beta2),
                eps=config.eps,
                weight_decay=config.weight_decay,
                shampoo_beta=config.soap.shampoo_beta,
                every=config.soap.every,
                max_side=SOAP_MAX_SIDE,
                cautious=config.cautious_decay,
            ),
            config.lr,
            hidden.lr_ratio,
        )
        for hidden, _ in split
        if hidden.names
    ]
    rest = [others for _, others in split if others.names]
    return WholeOptimizer(whole, build_adamw(rest, config, device) if rest else None)


def build_lion(groups: list[ParameterGroup], config: OptimConfig, device: torch.device) -> Lion:
    """Builds Lion (Chen et al. 2023); state after the first step: one momentum for each parameter."""
    betas = (config.beta1, config.beta2)
    return Lion(_torch_groups(groups, config), config.lr, betas, config.weight_decay, config.cautious_decay)


def _torch_groups(groups: list[ParameterGroup], config: OptimConfig) -> list[dict[str, Any]]:
    """Returns a torch group for each group, with its name under the key `name`."""
    return [
        {
            "params": list(group.parameters),
            "weight_decay": config.weight_decay / group.scale.lr if group.decays else 0.0,
            "eps": config.eps * group.scale.eps,
            "name": group.name,
            "lr_ratio": group.lr_ratio,
        }
        for group in groups
    ]


def build_adamw(groups: list[ParameterGroup], config: OptimConfig, device: torch.device) -> torch.optim.Optimizer:
    """Builds AdamW (Loshchilov and Hutter 2019) in one fused kernel, on CUDA and on CPU.

    State after the first step: two moments for each parameter, in its shape and dtype. `device` is
    that of the parameters when the optimizer runs.
    """
    # On one CPU core the fused kernel is 3 times as fast as torch's loop for many small tensors, 8
    # times for one of 20M.
    torch_groups = _torch_groups(groups, config)
    if config.cautious_decay:
        for group in torch_groups:
            group |= {"weight_decay": 0.0, "cautious_decay": group["weight_decay"]}
    optimizer = torch.optim.AdamW(
        torch_groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=device.type in ("cuda", "cpu"),
    )
    if config.cautious_decay:
        optimizer.register_step_pre_hook(decay_cautiously)
    return optimizer


# Size of the optimizer state, computed before it exists: for the disk space of checkpoints.


class StateSize(NamedTuple):
    """Numbers of fp32 elements and of tensors, without step counts; of a rank that has all."""

    elements: int
    tensors: int


def state_size(groups: Sequence[ParameterGroup], config: OptimConfig) -> StateSize:
    """Returns the size of the state of an optimizer, with `optim.ema`; unknown kinds count as AdamW."""
    sizes = list(_SIZES.get(config.kind, _adamw)(groups))
    if config.muon.row_beta2 is not None:
        sizes += [shape[0] for group in groups for shape in _shapes(split_hidden(group)[0])]
    if config.ema.is_on:
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


def _lion(groups: Iterable[ParameterGroup]) -> list[int]:
    """Returns the sizes of one momentum a parameter."""
    return [sum(map(math.prod, blocks)) for group in groups for blocks in group.blocks]


def _soap(groups: Iterable[ParameterGroup]) -> list[int]:
    """Returns the sizes of two moments, and of two squares of each side of a hidden matrix."""
    split = [split_hidden(group) for group in groups]
    shapes = [shape for hidden, _ in split for shape in _shapes(hidden)]
    moments = [math.prod(shape) for shape in shapes]
    sides = [side * side for shape in shapes for side in shape if side <= SOAP_MAX_SIDE]
    return [*moments, *moments, *sides, *sides, *_adamw(rest for _, rest in split)]


def _adafactor(groups: Iterable[ParameterGroup]) -> list[int]:
    """Returns the sizes of a row and a column a matrix, one variance an element of a vector."""
    sizes: list[int] = []
    for group in groups:
        for shape in _shapes(group):
            sizes += shape if len(shape) == 2 else [math.prod(shape)]
    return sizes


_SIZES: dict[str, Callable[[Iterable[ParameterGroup]], list[int]]]
_SIZES = {"adamw": _adamw, "adafactor": _adafactor, "lion": _lion, "muon": _muon, "soap": _soap}

OPTIMIZERS: dict[str, Callable[[list[ParameterGroup], OptimConfig, torch.device], torch.optim.Optimizer]] = {
    "adamw": build_adamw,
    "adafactor": build_adafactor,
    "lion": build_lion,
    "muon": build_muon,
    "soap": build_soap,
}
"""Builder of each `optim.kind`: (groups, OptimConfig, device) -> torch.optim.Optimizer."""


def build_optimizer(groups: list[ParameterGroup], config: OptimConfig, device: torch.device) -> torch.optim.Optimizer:
    """Builds the optimizer of `config.kind`."""
    return OPTIMIZERS[config.kind](groups, config, device)
