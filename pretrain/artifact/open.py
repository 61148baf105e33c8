"""Opens any WHAT for use: its model with the weights in it, and its tokenizer."""

from dataclasses import dataclass
from pathlib import Path

import torch

from pretrain.artifact.what import What, open_what
from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.recurrent import AnyModelConfig
from pretrain.errors import CheckpointError, ConfigError
from pretrain.generate.codec import Codec
from pretrain.interop.generation import GenerationDefaults
from pretrain.model import LanguageModel, build_model


@dataclass(frozen=True, slots=True)
class Artifact:
    """A trained model, ready to use.

    Attributes:
        model: fp32, in eval mode.
        codec: Its tokenizer.
        model_config: What the model is.
        generation: Settings that its makers generate with.
        path: Where the weights came from.
    """

    model: LanguageModel
    codec: Codec
    model_config: AnyModelConfig
    generation: GenerationDefaults
    path: Path


def open_artifact(what: Path, device: str = "cpu") -> Artifact:
    """Loads a model for use.

    Args:
        what: A run, a checkpoint inside one, a model folder or a Hugging Face folder.
        device: Where the model goes; `auto` takes CUDA where there is one.

    Raises:
        CheckpointError: No intact checkpoint, or files are missing.
        ConfigError: The config is damaged, or there is no such device.
        DataError: There is no tokenizer, or it cannot be read.
    """
    described = open_what(what)
    codec = described.load_codec()
    model = load_model(described, _find_device(device))
    return Artifact(model, codec, described.config, described.generation, described.path)


def load_model(what: What, device: torch.device) -> LanguageModel:
    """Builds the model and fills it, one parameter at a time. Raises: CheckpointError, where parameters differ."""
    model = build_model(what.config, PLAIN_ENGINE, device)
    parameters = dict(model.named_parameters())
    differing = sorted(parameters.keys() ^ what.names)
    if differing:
        raise CheckpointError(
            f"its parameters are not those of its config: {', '.join(differing[:5])}",
            where=str(what.path),
            fix="use the version, and the modules under extend, that it was written with",
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            weight = what.read(name)
            if weight.shape != parameter.shape:
                shapes = f"shape {list(weight.shape)}, {list(parameter.shape)} by its config"
                raise CheckpointError(f"{name} has {shapes}", where=str(what.path), fix="use another checkpoint")
            parameter.copy_(weight)
    return model.eval()


def _find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name} is unknown", fix="use auto, cpu or cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: torch sees no GPU", fix="use --device cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device {name} is no device", fix="use cpu, cuda or cuda:0") from None
