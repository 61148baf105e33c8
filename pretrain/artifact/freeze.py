"""Which parameters are trained: all, all but those that `init.freeze` names, or adapters with what goes beside them."""

from collections.abc import Collection

from torch import nn

from pretrain.artifact.adapters import is_adapter, name_without_adapter
from pretrain.config.patterns import check_patterns, matches
from pretrain.errors import ConfigError


def freeze(model: nn.Module, patterns: Collection[str]) -> int:
    """Freezes parameters by name, in place; returns how many values that is.

    A frozen parameter is in no group of the optimizer, and has neither moments nor an fp32 copy.

    Raises:
        ConfigError: A pattern names no parameter, or nothing is left to be trained.
    """
    names = [name for name, _ in model.named_parameters()]
    check_patterns("init.freeze", patterns, names)
    for name, parameter in model.named_parameters():
        if matches(name, patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"init.freeze={list(patterns)} leaves nothing to train", fix="name fewer parameters")
    return sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)


def train_beside(model: nn.Module, anew: Collection[str], patterns: Collection[str]) -> list[str]:
    """Lets parameters be trained beside adapters: those that begin anew, and those that are named. Returns the names.

    Raises:
        ConfigError: A pattern names no parameter.
    """
    names = {name: name_without_adapter(name) for name, _ in model.named_parameters() if not is_adapter(name)}
    check_patterns("finetune.also", patterns, list(names.values()))
    chosen = []
    for name, own in names.items():
        if own in anew or matches(own, patterns):
            model.get_parameter(name).requires_grad_(True)
            chosen.append(own)
    return chosen
