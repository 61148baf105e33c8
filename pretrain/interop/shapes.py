"""Name and shape of every parameter of a model, without its storage."""

import torch

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.recurrent import AnyModelConfig
from pretrain.model import build_model


def parameter_shapes(config: AnyModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter by name, tied ones once; builds the model on the meta device for it."""
    model = build_model(config, PLAIN_ENGINE, torch.device("meta"))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
