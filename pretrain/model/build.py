"""Builds the model that a config describes, of whichever kind."""

from typing import overload

import torch

from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.recurrent import AnyModelConfig, RecurrentConfig
from pretrain.model.recurrent.recurrent import Recurrent, build_recurrent
from pretrain.model.transformer import Transformer, build_transformer

LanguageModel = Transformer | Recurrent
"""What is trained, and what generates."""


@overload
def build_model(
    config: ModelConfig, engine: EngineConfig, device: torch.device, *, storage: bool = True
) -> Transformer:
    """A Transformer."""


@overload
def build_model(
    config: RecurrentConfig, engine: EngineConfig, device: torch.device, *, storage: bool = True
) -> Recurrent:
    """A recurrent model."""


@overload
def build_model(
    config: AnyModelConfig, engine: EngineConfig, device: torch.device, *, storage: bool = True
) -> LanguageModel:
    """Either."""


def build_model(
    config: AnyModelConfig, engine: EngineConfig, device: torch.device, *, storage: bool = True
) -> LanguageModel:
    """Builds a model on `device` with its weights unset.

    Args:
        config: The model; `vocab_size` must be known.
        engine: Names the attention kernel, what is recomputed in the backward pass, and whether blocks are compiled.
        device: Where the model will run; on the meta device it has no storage.
        storage: False: leave the parameters on the meta device, for someone who fills them piece by piece.

    Raises:
        ConfigError: The attention backend cannot serve the model or the device, or recurrent cells are to be recomputed
            or compiled: the reason is given.
    """
    if isinstance(config, RecurrentConfig):
        return build_recurrent(config, engine, device, storage=storage)
    return build_transformer(config, engine, device, storage=storage)
