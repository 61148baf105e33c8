"""Chooses a family that represents a model exactly: its config must survive a round trip through config.json."""

from typing import Any

from pretrain.config.model import ModelConfig, RotaryScaling, StackConfig
from pretrain.errors import ConfigError
from pretrain.interop import FAMILIES
from pretrain.interop.family import Family

_SHOWN = 6
"""Differences that are written out in an error."""


def choose_family(config: ModelConfig, name: str | None = None) -> Family:
    """Returns the first family that represents a model exactly.

    Args:
        config: The model, `vocab_size` filled in.
        name: `model_type` of the family to use, which must represent it exactly too; None: any.

    Raises:
        ConfigError: There is none; names the nearest one, and the keys in which it differs.
    """
    if name is not None and name not in FAMILIES:
        raise ConfigError(f"unknown family {name!r}", fix=f"use one of {', '.join(FAMILIES)}")
    found: list[tuple[Family, list[str]]] = []
    for family in FAMILIES.values() if name is None else [FAMILIES[name]]:
        different = differences(config, family)
        if not different:
            return family
        found.append((family, different))
    nearest, different = min(found, key=lambda entry: (_other_stacks(config, entry[0]), len(entry[1])))
    more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
    which = "no Hugging Face family represents" if name is None else f"{name} does not represent"
    raise ConfigError(
        f"{which} this model exactly; "
        + (f"the nearest, {nearest.model_type}, has " if name is None else "it has ")
        + ", ".join(different[:_SHOWN])
        + more,
        where="model",
        fix="export it where these keys are the same",
    )


def differences(config: ModelConfig, family: Family) -> list[str]:
    """Returns `key=theirs, not ours` of each key that `family` would change; empty where it is exact."""
    try:
        theirs = facts(_read_back(config, family))
    except ConfigError as error:
        return [f"no such model: {error.what}"]
    ours = facts(config)
    keys = list(dict.fromkeys([*ours, *theirs]))
    return [
        f"{key}={_shown(theirs.get(key))}, not {_shown(ours.get(key))}"
        for key in keys
        if ours.get(key) != theirs.get(key)
    ]


def _read_back(config: ModelConfig, family: Family) -> ModelConfig:
    names = frozenset(name for weight in family.weights(config) for name, _ in weight.theirs)
    return family.read_config(family.write_config(config), names)


def _other_stacks(config: ModelConfig, family: Family) -> bool:
    """Whether the family has another shape, an encoder for a decoder say: then no key makes it nearer."""
    try:
        return _read_back(config, family).shape != config.shape
    except ConfigError:
        return True


def _shown(value: Any) -> str:
    return (
        {None: "null", True: "true", False: "false"}.get(value, str(value)) if not isinstance(value, tuple) else "..."
    )


def facts(config: ModelConfig) -> dict[str, Any]:
    """Returns what defines the function of a model, by key: defaults filled in, keys without effect left out.

    Not in it: how a model is initialised and trained (dropout), ids of special tokens, padding of the vocabulary.
    """
    found: dict[str, Any] = {"shape": config.shape}
    for name in ("encoder", "decoder"):
        stack = getattr(config, name)
        if stack is not None:
            found |= {f"{name}.{key}": value for key, value in _stack_facts(stack).items()}
    keys = ("vocab_size", "max_seq_len", "tied_embeddings", "scaled_embeddings", "pooler")
    found |= {key: getattr(config, key) for key in keys} | {"head.kind": config.head.kind}
    if config.head.kind == "lm":
        found |= {f"head.{key}": getattr(config.head, key) for key in ("transform", "bias", "scaled", "soft_cap")}
    if config.head.kind == "labels":
        found |= {f"head.{key}": getattr(config.head, key) for key in ("transform", "bias", "mean")}
        found["head.labels"] = tuple(config.head.labels)
    return found


def _stack_facts(stack: StackConfig) -> dict[str, Any]:
    keys = ["layers", "width", "heads", "ff_width", "activation", "gated", "norm", "norm_eps", "norm_placement"]
    keys += ["input_norm", "bias", "qk_norm", "scaled_attention", "position", "token_types"]
    found = {key: getattr(stack, key) for key in keys}
    found |= {"kv_heads": stack.num_kv_heads, "head_width": stack.per_head_width, "qkv_bias": stack.has_qkv_bias}
    has_window = [window is not None for window in stack.windows]
    if any(has_window):
        found |= {"window": stack.window, "windows": stack.windows}
    if stack.position == "sinusoidal":
        found["sinusoid"] = stack.sinusoid
    if stack.position == "relative":
        found |= {key: getattr(stack, key) for key in ("relative_buckets", "relative_max_distance")}
    if stack.position == "rotary":
        found |= _scaling_facts(stack.rope_scaling)
        if not all(has_window):
            found["rope_theta"] = stack.rope_theta
        if any(has_window):
            found["rope_local_theta"] = stack.rope_local_theta or stack.rope_theta
    return found


def _scaling_facts(scaling: RotaryScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_scaling.kind": None}
    keys = ["kind", "factor"]
    if scaling.kind == "llama3":
        keys += ["original_max_seq_len", "low_freq_factor", "high_freq_factor"]
    return {f"rope_scaling.{key}": getattr(scaling, key) for key in keys}
