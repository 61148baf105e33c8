"""The files of a Hugging Face folder: their names, and JSON from a stranger."""

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pretrain.config.model import ModelConfig, SpecialTokens
from pretrain.errors import CheckpointError, ConfigError

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


# Reads a config.json key by key: types are checked, and what this code cannot represent is refused
# by name.


FILE = "config.json"

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}

"""Their name of an activation -> ours. Approximations that are none of ours (gelu_fast, quick_gelu) are left out."""

THEIR_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "silu": "silu", "relu": "relu"}

"""Our name of an activation -> theirs."""


def refusal(key: str, value: Any, why: str, fix: str = "") -> ConfigError:
    """Returns the error for a value of config.json that is not exactly one of ours."""
    return ConfigError(f"{key}={value!r}: {why}", where=FILE, fix=fix)


class Fields:
    """The keys of one config.json.

    A key that is missing has the default given, a null is None: that is how transformers reads them. Every method
    raises ConfigError with key and value where the type is another.

    Args:
        values: The parsed file.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def _read(self, key: str, default: Any, kinds: tuple[type, ...], wanted: str) -> Any:
        value = self.values.get(key, default)
        if value is None and default is None and key not in self.values:
            raise ConfigError(f"{key} is missing", where=FILE, fix=f"add it: {wanted}")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise refusal(key, value, f"must be {wanted}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns an integer; without a default the key must be there."""
        return self._read(key, default, (int,), "an integer")

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a number; without a default the key must be there."""
        return float(self._read(key, default, (int, float), "a number"))

    def flag(self, key: str, default: bool) -> bool:
        """Returns true or false."""
        return self._read(key, default, (bool,), "true or false")

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """Returns an integer, or None where the file says null, or says nothing and the default is None."""
        return None if self.values.get(key, default) is None else self.integer(key, default)

    def section(self, key: str) -> dict[str, Any]:
        """Returns a nested object; an empty one where it is null or missing."""
        return self._read(key, {}, (dict,), "an object") if self.values.get(key) is not None else {}

    def activation(self, key: str, default: str) -> str:
        """Returns our name of an activation."""
        name = self._read(key, default, (str,), "the name of an activation")
        if name not in ACTIVATIONS:
            raise refusal(key, name, f"not an activation of ours ({', '.join(sorted(ACTIVATIONS))})")
        return ACTIVATIONS[name]

    def claims(self, architecture: str) -> bool:
        """Returns whether `architectures` lists a class of transformers."""
        listed = self.values.get("architectures")
        return isinstance(listed, list) and architecture in listed

    def only(self, key: str, allowed: Any, why: str, *, missing: Any = None) -> None:
        """Refuses any value but `allowed`.

        Args:
            key: The key.
            allowed: The value that ours has built in.
            why: What the other values would mean.
            missing: What transformers reads where the key is missing; None: `allowed`.
        """
        value = self.values.get(key, allowed if missing is None else missing)
        if value != allowed:
            raise refusal(key, value, f"only {allowed!r} can be represented: {why}")

    def special_tokens(self, *, start: str | None = None, **defaults: int | None) -> SpecialTokens:
        """Returns the ids of special tokens.

        Of several end-of-text ids the first is taken: the others end turns of a chat.

        Args:
            start: Key of the decoder's first input, where the model has one.
            **defaults: `pad`, `bos`, `eos`: what this model type has where the key is missing.
        """
        found: dict[str, int | None] = {}
        for name in ("pad", "bos", "eos"):
            value = self.values.get(f"{name}_token_id", defaults.get(name))
            value = (value[0] if value else None) if isinstance(value, list) else value
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise refusal(f"{name}_token_id", value, "must be an integer or a list of them")
            found[name] = None if value is None or value < 0 else value  # -1 is an old way to say that there is none
        if start is not None:
            found["start"] = self.optional_integer(start)
        return SpecialTokens(**found)


def build_config(**values: Any) -> ModelConfig:
    """Builds a config from values of a config.json. Raises: ConfigError, where they do not fit together."""
    try:
        return ModelConfig(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"no model of ours has these values: {place + ': ' if place else ''}{first['msg']}", where=FILE
        ) from None
