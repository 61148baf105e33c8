"""Low-rank adapters beside linear layers (Hu et al. 2022), by peft.

    X = W x   ->   W x + alpha / rank * B A dropout(x)      W frozen, A [rank, in] drawn, B [out, rank] zeros

A fused layer has one adapter: queries, keys and values share A, as rows of one matrix do. So the update of each has the
rank asked for, with fewer values than three adapters.
"""

import logging

import torch
from torch import Tensor, nn

from pretrain.artifact.adapters import is_adapter
from pretrain.config.finetune import FinetuneConfig
from pretrain.config.patterns import matches
from pretrain.errors import ConfigError, LaunchError
from pretrain.model.init import seeded_by_name
from pretrain.model.stack import Stack

log = logging.getLogger(__name__)


def add_adapters(model: nn.Module, config: FinetuneConfig) -> list[str]:
    """Puts an adapter beside every layer that `config.targets` names, and freezes all else, in place.

    Args:
        model: May be on the meta device; its adapters are then, too. Their values are not set.
        config: Of kind `lora`.

    Returns:
        The names of the layers.

    Raises:
        ConfigError: A pattern names no linear layer of a block.
        LaunchError: peft is missing.
    """
    linear = [name for name, part in model.named_modules() if type(part) is nn.Linear and ".blocks." in name]
    for pattern in config.targets:
        if not any(matches(name, [pattern]) for name in linear):
            kinds = sorted({name.split(".blocks.")[1].partition(".")[2] for name in linear})
            raise ConfigError(
                f"finetune.targets: {pattern!r} is no linear layer of a block",
                fix=f"use *.{' or *.'.join(kinds)}, or '*' for all",
            )
    layers = [name for name in linear if matches(name, config.targets)]
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise LaunchError(f"finetune.kind=lora needs the peft package: {error}", fix="install it") from None
    adapters = LoraConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=layers)
    inject_adapter_in_model(adapters, model, low_cpu_mem_usage=next(model.parameters()).is_meta)
    if config.dropout:
        for part in model.modules():
            if isinstance(part, Stack):
                part.recompute.draws_noise = True
    return layers


def initial_adapter(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Draws one matrix of an adapter, fp32, on the CPU: A as `nn.Linear` is by torch and peft, B zeros."""
    assert is_adapter(name)
    weight = torch.zeros(shape)
    if ".lora_A." in name:
        bound = shape[1] ** -0.5
        weight.uniform_(-bound, bound, generator=seeded_by_name(name, seed))
    return weight
