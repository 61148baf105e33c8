"""Muon for the hidden matrices, AdamW for the rest: `optim.kind: muon`.

Muon (Jordan et al. 2024) moves a matrix by its momentum with all singular values made equal, by a few Newton-Schulz
iterations in bf16. That means something for a matrix between two hidden states, and not for a look-up table, an output
head, a norm or a bias: these take AdamW, at `optim.lr`. A fused weight is stepped matrix by matrix (`blocks.py`).
"""

from functools import partial

import torch

from pretrain.config.optim import OptimConfig
from pretrain.errors import LaunchError
from pretrain.optim.build import build_adamw
from pretrain.optim.groups import ParameterGroup
from pretrain.optim.whole import WholeGroup, WholeOptimizer

HEAD_PART = "head"
"""Part of parameter names that marks what belongs to the output head."""


def split_hidden(group: ParameterGroup) -> tuple[ParameterGroup, ParameterGroup]:
    """Returns the hidden matrices of a group, and the rest of it."""

    def is_hidden(name: str, blocks: tuple[tuple[int, ...], ...]) -> bool:
        return group.decays and len(blocks[0]) == 2 and HEAD_PART not in name.split(".")

    rest = group.select(group.name, lambda name, blocks: not is_hidden(name, blocks))
    return group.select(group.name.replace("decay", "matrix"), is_hidden), rest


def build_muon(groups: list[ParameterGroup], config: OptimConfig, device: torch.device) -> WholeOptimizer:
    """Builds torch's Muon over the decaying matrices of the stacks, and AdamW over everything else.

    State, once a first step has been taken: one momentum a matrix, two moments for each other parameter.

    Raises:
        LaunchError: This torch has no Muon.
    """
    if not hasattr(torch.optim, "Muon"):
        raise LaunchError(
            f"optim.kind=muon needs torch 2.9 or newer, this is {torch.__version__}",
            fix="install one, or use optim.kind=adamw",
        )
    muon = config.muon
    matrices, rest = [], []
    for group in groups:
        hidden, others = split_hidden(group)
        matrices += [hidden] if hidden.names else []
        rest += [others] if others.names else []
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
    whole = [WholeGroup(group, make, muon.lr, muon.lr / config.lr * group.lr_ratio) for group in matrices]
    return WholeOptimizer(whole, build_adamw(rest, config, device) if rest else None)
