"""Nearest family of a config.json whose `model_type` is not known, by the keys that it reads."""

from functools import cache
from typing import Any

from pretrain.errors import ConfigError
from pretrain.families import FAMILIES
from pretrain.families.config_json import CONFIG
from pretrain.families.hybrids import LACKING
from pretrain.utils.units import listed

_SHOWN = 8
"""Keys that are written out in an error."""
_GENERAL = {
    "model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "auto_map", "return_dict", "id2label", "label2id", "num_labels", "problem_type",
    "tokenizer_class", "chunk_size_feed_forward", "max_length", "task_specific_params",
    "gradient_checkpointing", "vocab_size", "initializer_range", "tie_word_embeddings",
    "is_decoder", "is_encoder_decoder",
}  # fmt: skip
"""Keys of any model, as all that end with `token_id` are."""


class _Recorder(dict[str, Any]):
    """A config.json that records the keys which are asked for, of copies with further keys too."""

    def __init__(self, values: dict[str, Any], keys: set[str]) -> None:
        super().__init__(values)
        self.keys_read = keys

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a value."""
        self.keys_read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.keys_read.add(str(key))
        return super().__contains__(key)

    def __or__(self, other: Any) -> "_Recorder":  # type: ignore[override]
        return _Recorder({**self, **other}, self.keys_read)

    def __ror__(self, other: Any) -> "_Recorder":  # type: ignore[override]
        return _Recorder({**other, **self}, self.keys_read)


@cache
def _keys_of(model_type: str) -> set[str]:
    """Returns the keys of config.json that a family reads or writes."""
    family, keys = FAMILIES[model_type], set[str]()
    try:
        # The name of a tensor, as a MAE is read with its decoder only.
        config = family.read_config(_Recorder({}, keys), frozenset({"decoder."}))
    except ConfigError:  # what it has read until then
        return keys
    return keys | family.write_config(config).keys()


def unknown_model_type(values: dict[str, Any]) -> ConfigError:
    """Returns the error of a `model_type` without a family, which names the nearest.

    Keys without a value, a feature that is off say, count for no difference.
    """
    if reason := LACKING.get(str(values.get("model_type"))):
        tiny = {name: family.sizes[family.tiny].values for name, family in FAMILIES.items()}
        hybrids = [name for name, one in tiny.items() if "mixers" in one.get("decoder", {})]
        return ConfigError(
            f"model_type={values['model_type']!r} cannot be represented: {reason}",
            where=CONFIG,
            fix=f"use another hybrid: {', '.join(hybrids)}",
        )
    theirs = {key for key, value in values.items() if value and not key.endswith("token_id")}
    theirs -= _GENERAL
    read = {name: _keys_of(name) for name in FAMILIES}
    nearest = min(read, key=lambda name: (len(theirs - read[name]), len(read[name] - theirs)))
    problem = f"model_type={values.get('model_type')!r} is not known"
    if not theirs & read[nearest]:
        return ConfigError(problem, where=CONFIG, fix=f"known: {', '.join(FAMILIES)}")
    unread = [key for key in values if key in theirs - read[nearest]]
    keys = "knows all of its keys"
    if unread:
        keys = f"does not know its {listed(unread, _SHOWN)}"
    return ConfigError(
        f"{problem}; the nearest family, {nearest}, {keys}",
        where=CONFIG,
        fix=(
            f"if it computes what {nearest} does, set model_type to {nearest!r}, and compare its "
            "scores; a new family is one file, see docs/extending.md"
        ),
    )
