"""Keys of a Hugging Face config.json.

Types are checked, and a value that none of our models represents is refused by its key.
"""

import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from pretrain.config.base import MAX_LAYERS, MAX_ROWS, Section
from pretrain.config.model import ModelConfig, SpecialTokens
from pretrain.errors import ConfigError
from pretrain.utils.safe_read import MAX_INT

SectionT = TypeVar("SectionT", bound=Section)

CONFIG = "config.json"
MAX_SHOWN_CHARS = 200
"""Of a value that is refused."""

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
}
"""Their name of an activation -> ours; other approximations have none."""

THEIR_ACTIVATIONS = {name: name for name in ("gelu", "quick_gelu", "silu", "relu", "relu2")} | {
    "gelu_tanh": "gelu_pytorch_tanh"
}

TOKEN_KEYS = {
    "pad": "pad_token_id",
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "mask": "mask_token_id",
    "start": "decoder_start_token_id",
}
"""Role of a special token -> key of config.json and generation_config.json."""

Keys = Mapping[str, tuple[str, int | float]]
"""Key of config.json -> name in our config, and the default of transformers with its type."""


def refusal(key: str, value: Any, why: str, fix: str = "") -> ConfigError:
    """Returns the error for a value of config.json that is not exactly one of ours."""
    return ConfigError(f"{key}={repr(value)[:MAX_SHOWN_CHARS]}: {why}", where=CONFIG, fix=fix)


def finite(key: str, value: int | float) -> float:
    """Returns a number as a float. Raises: ConfigError: It has none, as `1e400`, or 400 digits."""
    if not abs(value) <= sys.float_info.max:
        raise refusal(key, value, "must be finite")
    return float(value)


class Fields:
    """The keys of one config.json: a missing key has its default, a null is None.

    Every method raises ConfigError with key and value where the type is wrong.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def _read(self, key: str, default: Any, kinds: tuple[type, ...], wanted: str) -> Any:
        value = self.values.get(key, default)
        if value is None and default is None and key not in self.values:
            raise ConfigError(f"{key} is missing", where=CONFIG, fix=f"add it: {wanted}")
        # bool is a subclass of int.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise refusal(key, value, f"must be {wanted}")
        return value

    def read(self, keys: Keys, defaults: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Returns a table's values by our names; `defaults` precede the table's."""
        readers: dict[type, Any] = {int: self.integer, float: self.number, bool: self.flag}
        values = {}
        for key, (ours, default) in keys.items():
            values[ours] = readers[type(default)](key, (defaults or {}).get(key, default))
            if ours.endswith("heads") and values[ours] < 1:  # what follows divides by it
                raise refusal(key, values[ours], "must be 1 or more")
        return values

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns an integer; without a default the key must be present."""
        value: int = self._read(key, default, (int,), "an integer")
        if abs(value) > MAX_INT:
            raise refusal(key, value, "has more than 53 bits")
        # Each is named before one is looked for.
        if key.endswith(("layer", "layers")) and value > MAX_LAYERS:
            raise refusal(key, value, f"no model has more than {MAX_LAYERS}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a number; without a default the key must be present."""
        return finite(key, self._read(key, default, (int, float), "a number"))

    def flag(self, key: str, default: bool) -> bool:
        """Returns true or false; a null is false, as in transformers."""
        if key in self.values and self.values[key] is None:
            return False
        return self._read(key, default, (bool,), "true or false")

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """Returns an integer; None for a null, and for a missing key without a default."""
        return None if self.values.get(key, default) is None else self.integer(key, default)

    def numbers(self, key: str) -> list[float]:
        """Returns a list of numbers."""
        values = self._read(key, None, (list,), "a list of numbers")
        if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in values):
            raise refusal(key, values, "must be a list of numbers")
        return [finite(key, one) for one in values]

    def section(self, key: str) -> dict[str, Any]:
        """Returns a nested object; an empty one where it is null or missing."""
        return self._read(key, {}, (dict,), "an object") if self.values.get(key) is not None else {}

    def activation(self, key: str, default: str) -> str:
        """Returns our name of an activation."""
        name = self._read(key, default, (str,), "the name of an activation")
        if name not in ACTIVATIONS:
            names = ", ".join(sorted(ACTIVATIONS))
            raise refusal(key, name, f"not an activation of ours ({names})")
        return ACTIVATIONS[name]

    @property
    def classes(self) -> list[str]:
        """Classes of transformers that `architectures` lists."""
        listed = self.values.get("architectures")
        return [str(name) for name in listed] if isinstance(listed, list) else []

    def claims(self, architecture: str) -> bool:
        """Returns whether `architectures` lists a class of transformers."""
        return architecture in self.classes

    def only(self, key: str, allowed: Any, why: str, *, missing: Any = None) -> None:
        """Refuses any value but `allowed`, which our models have built in.

        `why` is the meaning of other values; `missing` the default of transformers, if not
        `allowed`.
        """
        value = self.values.get(key, allowed if missing is None else missing)
        if value != allowed and not (value is None and not allowed):
            raise refusal(key, value, f"only {allowed!r} can be represented: {why}")

    def special_tokens(self, **defaults: int | None) -> SpecialTokens:
        """Returns the ids of pad, bos, eos, and of the further roles in `defaults`.

        Of several end-of-text ids the first is taken: the others end turns of a chat.
        """
        ids: dict[str, int | None] = {}
        for role in {"pad": None, "bos": None, "eos": None} | defaults:
            key = TOKEN_KEYS[role]
            value = self.values.get(key, defaults.get(role))
            if isinstance(value, list):
                value = value[0] if value else None
            if value is not None and (type(value) is not int or value > MAX_ROWS):
                raise refusal(key, value, "must be an integer or a list of them")
            # -1 is an old spelling of null.
            ids[role] = None if value is None or value < 0 else value
        return SpecialTokens(**ids)


def by_holder(values: Mapping[str, Any]) -> defaultdict[str, dict[str, Any]]:
    """Returns values by what has them: "head.scale" of "head", "width" of ""."""
    parts: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in values.items():
        holder, _, inner = name.rpartition(".")
        parts[holder][inner] = value
    return parts


def write_keys(part: Section, keys: Keys) -> dict[str, Any]:
    """Returns the values of a table under their keys, the inverse of `Fields.read`."""
    # A null is the stack's dropout, and its bias.
    resolved = {"attention_dropout": "attention_weight_dropout", "qkv_bias": "has_qkv_bias"}
    resolved["output_bias"] = "has_output_bias"
    return {key: getattr(part, resolved.get(ours, ours)) for key, (ours, _) in keys.items()}


def write_tokens(tokens: SpecialTokens, *further: str) -> dict[str, Any]:
    """Returns the keys of pad, bos, eos and `further` roles; null where there is no such token."""
    return {TOKEN_KEYS[role]: getattr(tokens, role) for role in ("pad", "bos", "eos", *further)}


def build_config(**values: Any) -> ModelConfig:
    """Builds a config from values of a config.json. Raises: ConfigError: They do not fit together."""
    return build_section(ModelConfig, values)


def build_section(section: type[SectionT], values: Mapping[str, Any]) -> SectionT:
    """Builds a section of a config. Raises: ConfigError: The values do not fit together."""
    try:
        return section(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        reason = f"{place}: {first['msg']}" if place else first["msg"]
        raise ConfigError(f"no model of ours has these values: {reason}", where=CONFIG) from None
