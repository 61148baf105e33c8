"""Distributed pretraining of Transformers, from raw text to a released checkpoint.

The names below are what scripts and notebooks use: the commands as functions, and their parts;
docs/python.ipynb shows them. Importing `pretrain` imports none of them: each is loaded at its first
use, so that the command line of a login node stays free of torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pretrain.api import TrainedRun, evaluate, export, generate, prepare, train
    from pretrain.artifact.open import Artifact, open_artifact
    from pretrain.checkpoint.load import WeightReader
    from pretrain.config.load import load_config
    from pretrain.generation.beam import Beams
    from pretrain.generation.constraints import Constraints
    from pretrain.generation.sampling import Sampling
    from pretrain.generation.text import generate_text
    from pretrain.model.build import build_model, init_weights
    from pretrain.shards.index import load_index
    from pretrain.shards.reader import ShardSet
    from pretrain.types import Batch

__version__ = "0.1.0"

_HOMES = {
    "Artifact": "pretrain.artifact.open",
    "Batch": "pretrain.types",
    "Beams": "pretrain.generation.beam",
    "Constraints": "pretrain.generation.constraints",
    "Sampling": "pretrain.generation.sampling",
    "ShardSet": "pretrain.shards.reader",
    "TrainedRun": "pretrain.api",
    "WeightReader": "pretrain.checkpoint.load",
    "build_model": "pretrain.model.build",
    "evaluate": "pretrain.api",
    "export": "pretrain.api",
    "generate": "pretrain.api",
    "generate_text": "pretrain.generation.text",
    "init_weights": "pretrain.model.build",
    "load_config": "pretrain.config.load",
    "load_index": "pretrain.shards.index",
    "open_artifact": "pretrain.artifact.open",
    "prepare": "pretrain.api",
    "train": "pretrain.api",
}

__all__ = [
    "Artifact",
    "Batch",
    "Beams",
    "Constraints",
    "Sampling",
    "ShardSet",
    "TrainedRun",
    "WeightReader",
    "build_model",
    "evaluate",
    "export",
    "generate",
    "generate_text",
    "init_weights",
    "load_config",
    "load_index",
    "open_artifact",
    "prepare",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pretrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # found without this function from now on
    return value
