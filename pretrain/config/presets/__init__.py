"""Presets: named shapes of models, plain data over `ModelConfig`, one file a shape."""

from pretrain.config.presets.registry import PRESETS, expand_preset

__all__ = ["PRESETS", "expand_preset"]
