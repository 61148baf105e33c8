"""Small random models of transformers for each family of the registry, from the config.json of its tiny preset."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers

from pretrain.families import FAMILIES
from pretrain.families.family import Family
from tests.unit.interop.releases import tiny


def config_of(family: Family, **model: Any) -> Any:
    """The config of transformers of a family's tiny preset, without dropout; `model` are keys of ours."""
    ours = tiny(family.tiny, **model)
    values = family.write_config(ours)
    values |= dict.fromkeys([key for key in values if "drop" in key], 0.0)
    # Large enough that scores are of order 1. A norm behind a state magnifies the rounding of small results, of which
    # their fp32 is as far from float64 as ours: 2e-5 at 0.1.
    spread = 0.03 if ours.last_stack.replaced_by else 0.1
    values |= dict.fromkeys(values.keys() & {"initializer_range", "init_std"}, spread)
    return class_of(family, **model).config_class(**values, attn_implementation="eager")


def class_of(family: Family, **model: Any) -> Any:
    """The class of transformers that has the tensors of a family's tiny preset."""
    return getattr(transformers, family.architecture(tiny(family.tiny, **model)))


def build_theirs(model_type: str, **model: Any) -> Any:
    """A model of random weights."""
    family = FAMILIES[model_type]
    theirs = class_of(family, **model)(config_of(family, **model))
    for name, weight in theirs.named_parameters():
        if name.endswith("A_log"):
            # Decays under which states matter, as they are learned. Those of 16 leave gradients of rounding alone.
            torch.nn.init.uniform_(weight, -1.0, 1.0)
    if hasattr(theirs, "final_logits_bias"):
        theirs.final_logits_bias.requires_grad_()  # a buffer in theirs, a parameter in ours
    return theirs


def makers(shape: str, reads: str = "tokens", **model: Any) -> dict[str, Callable[[], Any]]:
    """Makers of a model of each family whose tiny preset has these stacks."""
    return {
        name: partial(build_theirs, name, **model)
        for name, family in FAMILIES.items()
        if family.reads == reads and tiny(family.tiny).shape == shape
    }
