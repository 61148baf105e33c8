"""Opens a model of any form for use, with its tokenizer and the normalisation of its training text.

Normalisation is part of a model: its later inputs must go through the same steps. They come from
`normalize` of the inputs in prepare.json, and are copied to the run folder by training, and from
there to a model folder by `average`. A Hugging Face folder has none: its tokenizer does everything.
"""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pretrain.artifact.model_path import BEGIN_KEY, TEMPLATE_KEY, open_source
from pretrain.artifact.source import ModelSource
from pretrain.checkpoint.format import MODEL_FILE
from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import AnyModelConfig
from pretrain.config.prepare import NormalizeConfig
from pretrain.config.texts.templates import Template, check_template
from pretrain.errors import CheckpointError, ConfigError
from pretrain.generation.constraints import Codec
from pretrain.model import LanguageModel, build_model
from pretrain.model.build import named_weights
from pretrain.types import GenerationDefaults
from pretrain.utils.safe_read import read_json

log = logging.getLogger(__name__)

_LEFT_ALONE = "later inputs of the model are not normalised"

NORMALIZE_KEY = "normalize"
"""Key of the steps in a run's normalize.json and in a model folder's model.json."""


def find_normalize(source: ModelSource) -> NormalizeConfig | None:
    """Returns the normalisation of a model's training text; None: none. Raises: CheckpointError."""
    file = source.path / MODEL_FILE if source.run is None else source.run.normalize
    if not file.is_file():
        return None
    try:
        return _parse(read_json(file).get(NORMALIZE_KEY))
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{NORMALIZE_KEY} is damaged: {error}".splitlines()[0],
            where=str(file),
            fix="restore it",
        ) from None


def dump_normalize(
    normalize: NormalizeConfig | None, template: Template | None = None, begin: int | None = None
) -> bytes:
    """Returns the content of a run's normalize.json: what is done to texts, written around turns, and begins both."""
    steps = None if normalize is None else normalize.model_dump(exclude_none=True)
    begun = {} if begin is None else {BEGIN_KEY: begin}
    return json.dumps({NORMALIZE_KEY: steps, TEMPLATE_KEY: template, **begun}).encode() + b"\n"


def normalize_of_data(folders: Sequence[Path]) -> NormalizeConfig | None:
    """Returns the normalisation of the texts of shard folders; None: none, or different ones."""
    warning = f"inputs were normalised in different ways: {_LEFT_ALONE}"
    normalize: NormalizeConfig | None = _common(folders, NORMALIZE_KEY, _parse, warning)
    return normalize


def template_of_data(folders: Sequence[Path]) -> Template | None:
    """Returns the template of the conversations of shard folders; None: none, or different ones."""
    warning = "conversations have different templates: none is kept"
    template: Template | None = _common(folders, TEMPLATE_KEY, check_template, warning)
    return template


def _common(folders: Sequence[Path], key: str, parse: Callable[[Any], Any], warning: str) -> Any:
    """Returns the value of a key of all inputs of shard folders; None: none, or different ones."""
    values = [value for folder in folders for value in _of_folder(folder, key, parse)]
    different = [value for number, value in enumerate(values) if value not in values[:number]]
    if len(different) > 1:
        log.warning("%s", warning)
    return different[0] if len(different) == 1 else None


def _of_folder(folder: Path, key: str, parse: Callable[[Any], Any]) -> list[Any]:
    """Returns the value of a key of each input of a shard folder."""
    file = folder / "prepare.json"
    try:
        options = read_json(file)["options"]
        return [parse(value) for value in _by_input(options, key)]
    except FileNotFoundError:  # re-sharded tokens of another system, or an address without it
        return [None]
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read (%s): %s", file, error, _LEFT_ALONE)
        return [None]


def _by_input(options: dict[str, Any], key: str) -> list[Any]:
    """Returns `inputs.N.key` of each input; of a section, a mapping of its own keys."""
    values: dict[str, Any] = {}
    for place, value in options.items():
        root, number, name, *rest = [*place.split(".", 3), "", ""][:4]
        if root != "inputs":
            continue
        before = values.setdefault(number, None)
        if name == key:
            values[number] = {**(before or {}), rest[0]: value} if rest[0] else value
    return list(values.values())


def _parse(steps: dict[str, Any] | None) -> NormalizeConfig | None:
    return None if steps is None else NormalizeConfig.model_validate(steps)


@dataclass(frozen=True, slots=True)
class Artifact:
    """A trained model, fp32 and in eval mode, with its tokenizer and the defaults of its release."""

    model: LanguageModel
    codec: Codec
    model_config: AnyModelConfig
    generation: GenerationDefaults
    path: Path
    normalize: NormalizeConfig | None = None
    """Steps that its training applied to texts, and that a prompt needs too."""

    def normalized(self, texts: Iterable[str]) -> Iterable[str]:
        """Returns prompts, normalized like the texts of the training. Raises: LaunchError: Its package is missing."""
        if self.normalize is None:
            return texts
        from pretrain.preparation.normalize import build_normalizers  # not at the start of a training

        return map(build_normalizers(self.normalize)[0], texts)


def open_artifact(path: str | Path, device: str = "cpu") -> Artifact:
    """Loads a model of any form for use, on a device; `auto` takes CUDA if available.

    Raises:
        CheckpointError: No intact checkpoint, or files are missing.
        ConfigError: The config is damaged, or there is no such device.
        DataError: There is no tokenizer, or it cannot be read.
    """
    return load_artifact(open_source(Path(path)), device)


def load_artifact(source: ModelSource, device: str) -> Artifact:
    """Loads a described model for use. Raises: as `open_artifact`."""
    codec = source.load_codec()  # a missing tokenizer is reported before the weights are read
    model = load_model(source, find_device(device))
    return Artifact(model, codec, source.config, source.generation, source.path, find_normalize(source))


def load_model(source: ModelSource, device: torch.device) -> LanguageModel:
    """Builds the model and loads its weights one by one. Raises: CheckpointError: Parameters differ."""
    model = build_model(source.config, PLAIN_ENGINE, device)
    weights = dict(named_weights(model))
    differing = sorted(weights.keys() ^ source.shapes.keys())
    if differing:
        raise CheckpointError(
            f"its parameters are not those of its config: {', '.join(differing[:5])}",
            where=str(source.path),
            fix="use the version, and the modules under extend, that it was written with",
        )
    with torch.no_grad():
        for name, weight in weights.items():
            saved = source.read(name)
            if saved.shape != weight.shape:
                raise CheckpointError(
                    f"{name} has shape {list(saved.shape)}, {list(weight.shape)} by its config",
                    where=str(source.path),
                    fix="use another checkpoint",
                )
            weight.copy_(saved)
    return model.eval()


def find_device(name: str) -> torch.device:
    """Returns a device; `auto` is CUDA if available. Raises: ConfigError: There is no such device."""
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
