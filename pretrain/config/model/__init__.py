"""`model:` by its kind: a Transformer, or `kind: recurrent`, a baseline of it."""

from typing import Annotated, Any

from pydantic import ValidatorFunctionWrapHandler, WrapValidator

from pretrain.config.base import Section
from pretrain.config.model.any_kind import HeadConfig, SpecialTokens
from pretrain.config.model.experts import ExpertsConfig
from pretrain.config.model.latent_attention import LatentConfig
from pretrain.config.model.patches import ImageSize, PatchesConfig
from pretrain.config.model.recurrent import RecurrentConfig, RecurrentStackConfig
from pretrain.config.model.rotary_scaling import RotaryScaling
from pretrain.config.model.stack import StackConfig
from pretrain.config.model.transformer import ModelConfig

__all__ = [
    "GENERATOR",
    "MODEL_SECTIONS",
    "AnyModelConfig",
    "ExpertsConfig",
    "HeadConfig",
    "ImageSize",
    "LatentConfig",
    "ModelConfig",
    "ModelSection",
    "PatchesConfig",
    "RecurrentConfig",
    "RecurrentStackConfig",
    "RotaryScaling",
    "SpecialTokens",
    "StackConfig",
    "parse_model",
]

AnyModelConfig = ModelConfig | RecurrentConfig

GENERATOR = "generator."
"""Beginning of the names of a generator's own weights (`ModelConfig.generator_heads`)."""

MODEL_SECTIONS: dict[str, type[Section]] = {"transformer": ModelConfig, "recurrent": RecurrentConfig}
"""Sections by `model.kind`."""


def parse_model(values: Any) -> AnyModelConfig:
    """Checks the values of `model:` against the section of its kind. Raises: ValueError."""
    if isinstance(values, AnyModelConfig):
        return values
    kind = values.get("kind", "transformer") if isinstance(values, dict) else "transformer"
    if not isinstance(kind, str) or kind not in MODEL_SECTIONS:
        raise ValueError(f"kind={kind} is unknown; use {' or '.join(MODEL_SECTIONS)}")
    checked = MODEL_SECTIONS[kind].model_validate(values)
    assert isinstance(checked, AnyModelConfig)
    return checked


def _by_kind(values: Any, handler: ValidatorFunctionWrapHandler) -> AnyModelConfig:
    """Reports the errors of the section of that kind only; a plain union reports both sections'."""
    return parse_model(values)


ModelSection = Annotated[AnyModelConfig, WrapValidator(_by_kind)]
"""The type of `model:`."""
