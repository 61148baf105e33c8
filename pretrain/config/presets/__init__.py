"""Presets: named shapes of models, plain data over `ModelConfig`, one file a shape."""

from pretrain.config.presets.expand import expand_preset
from pretrain.config.presets.registry import PRESETS

__all__ = ["PRESETS", "expand_preset"]
