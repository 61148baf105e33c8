"""Files of a Hugging Face folder: names, JSON objects, and the normalisation of pixels."""

from pathlib import Path
from typing import Any

from pretrain.config.model import PatchesConfig
from pretrain.errors import CheckpointError
from pretrain.families.config_json import Fields, finite, refusal
from pretrain.utils.safe_read import open_file, parse_json

GENERATION = "generation_config.json"
PREPROCESSOR = "preprocessor_config.json"
CARD = "README.md"
CHAT_TEMPLATE = "chat_template.jinja"
WEIGHTS = "model.safetensors"
PICKLED_WEIGHTS = "pytorch_model.bin"

MAX_JSON_BYTES = 16 * 1024 * 1024
"""A hundred times the index of a model of 400 billion parameters."""


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises: CheckpointError: Missing, too large, not JSON, or not an object."""
    try:
        with open_file(path) as file:
            content = file.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise ValueError(f"more than {MAX_JSON_BYTES} bytes")
        value = parse_json(content)
        if not isinstance(value, dict):
            raise ValueError("not an object")
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
        raise CheckpointError(
            reason,
            where=str(path),
            fix="give a folder of a Hugging Face model",
        ) from None
    except ValueError as error:
        reason = f"not a JSON object: {error}"
        raise CheckpointError(reason, where=str(path), fix="fetch the file again") from None
    return value


def read_preprocessor(folder: Path) -> dict[str, list[float]]:
    """Returns `mean` and `std` of pixels from a preprocessor_config.json; empty without one.

    Raises:
        CheckpointError: The file is damaged.
        ConfigError: Pixels are scaled or normalised in another way than ours.
    """
    if not (folder / PREPROCESSOR).is_file():
        return {}
    fields = Fields(read_object(folder / PREPROCESSOR))
    if not fields.flag("do_normalize", True):
        return {"mean": [0.0], "std": [1.0]}
    settings = {}
    for ours, key in (("mean", "image_mean"), ("std", "image_std")):
        value = fields.values.get(key, [0.5])
        numbers = value if isinstance(value, list) else [value]
        if not numbers or not all(isinstance(one, int | float) for one in numbers):
            raise refusal(key, value, "must be a number for each channel")
        # One for all channels where they are equal, so that an export is read back as it was.
        each = numbers if len(set(numbers)) > 1 else numbers[:1]
        settings[ours] = [finite(key, one) for one in each]
    return settings


def write_preprocessor(patches: PatchesConfig) -> dict[str, Any]:
    """Returns a preprocessor_config.json: the square of `model.input`, and its normalisation."""
    values = {"image_mean": patches.mean, "image_std": patches.std}
    each = {key: one if len(one) > 1 else one * patches.channels for key, one in values.items()}
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": patches.image, "width": patches.image},
        "resample": 2,  # bilinear
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        **each,
    }
