"""Small Hugging Face folders for tests, and what it takes to damage them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pretrain.config.model import ModelConfig
from pretrain.config.presets import expand_preset
from pretrain.families import FAMILIES
from pretrain.interop.tensors import parameter_shapes
from pretrain.interop.write import ExportReport, write_release

VOCAB = 61


TINY = {name: family.tiny for name, family in FAMILIES.items()}
"""The tiny preset of each family."""


def tiny(preset: str = "llama-tiny", **model: Any) -> ModelConfig:
    """A tiny preset; the vocabulary is no multiple of the padding's. Of images: with three labels."""
    return _tiny(preset, **model) if model else _tiny_preset(preset)


@cache
def _tiny_preset(preset: str) -> ModelConfig:
    return _tiny(preset)


def _tiny(preset: str, **model: Any) -> ModelConfig:
    values = expand_preset({"preset": preset, **model})
    if values.get("input") is not None and values["head"].get("kind") == "labels":
        values["head"] = {"labels": ["a", "b", "c"], **values["head"]}
    elif values.get("input") is None or values["head"]["kind"] == "lm":
        values = {"vocab_size": VOCAB, **values}
    return ModelConfig.model_validate(values)


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random values of every parameter; rows that pad the vocabulary are zeros, as an import makes them."""
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=generator) for name, shape in parameter_shapes(config).items()}
    for name in ("embedding.weight", "head.weight", "head.bias"):
        if name in found:
            found[name][config.vocab_size :] = 0
    return found


def write_tiny(folder: Path, config: ModelConfig, **options: Any) -> tuple[dict[str, Tensor], ExportReport]:
    """Writes a model of random weights; returns them by our names."""
    weights = random_weights(config)
    return weights, write_release(config, weights.__getitem__, folder, **options)


def change_config(folder: Path, **values: Any) -> None:
    """Sets keys of config.json; a value of `...` removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Reads model.safetensors."""
    return load_file(folder / "model.safetensors")


def save_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Replaces model.safetensors."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
