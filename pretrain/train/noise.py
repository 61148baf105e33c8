"""Dropout by counter: what a micro-batch drops depends on where it stands in the run, and on nothing before it."""

import torch

from pretrain.config.run import RunConfig
from pretrain.dist import World


def seed_dropout(config: RunConfig, world: World, step: int, micro: int) -> None:
    """Seeds by counter, so that there is no generator state to save: the same step drops the same units again."""
    stacks = (config.model.encoder, config.model.decoder)
    rates = [stack.dropout for stack in stacks if stack is not None]
    if any(rate > 0 for rate in (*rates, config.model.head.dropout, config.finetune.dropout)):
        # Odd multipliers spread the counters over 64 bits; the sum is unique for any run that fits a cluster.
        counters = (config.seed, step, micro, world.rank)
        factors = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
        torch.manual_seed(sum(c * f for c, f in zip(counters, factors, strict=True)) % 2**63)
