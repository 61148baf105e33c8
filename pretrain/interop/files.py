"""The files of a Hugging Face folder: their names, and JSON from a stranger."""

import json
from pathlib import Path
from typing import Any

from pretrain.errors import CheckpointError

CONFIG = "config.json"
GENERATION = "generation_config.json"
CARD = "README.md"
WEIGHTS = "model.safetensors"
PICKLED_WEIGHTS = "pytorch_model.bin"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "target.spm",
    "target_vocab.json",
    "chat_template.jinja",
)
"""Everything that a tokenizer of transformers is made of."""

MAX_JSON_BYTES = 16 * 1024 * 1024
"""The index of a model of 400 billion parameters has a hundredth of it."""


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        CheckpointError: No such file, too large, not JSON, or not an object.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise ValueError(f"more than {MAX_JSON_BYTES} bytes")
        value = json.loads(content)
        if not isinstance(value, dict):
            raise ValueError("not an object")
    except OSError as error:
        raise CheckpointError(
            f"cannot be read: {error.strerror or error}", where=str(path), fix="give a folder of a Hugging Face model"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not a JSON object: {error}", where=str(path), fix="fetch the file again") from None
    return value
