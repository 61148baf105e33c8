"""Chooses the family of an export: the config must survive a round trip through config.json."""

import json
from typing import Any

from pretrain.config.model import ModelConfig, StackConfig
from pretrain.errors import ConfigError
from pretrain.families import FAMILIES
from pretrain.families.family import Family
from pretrain.families.label_names import unit_of
from pretrain.kinds.mixers import MIXERS
from pretrain.utils.units import listed

_SHOWN = 6
"""Differences that are written out in an error."""


def choose_family(config: ModelConfig, name: str | None = None) -> Family:
    """Returns the first family that represents a model exactly, `vocab_size` filled in.

    With `name` only that family is tried; without, `config.family` before the others. Raises
    ConfigError, which names the nearest family and the keys in which it differs.
    """
    if name is not None and name not in FAMILIES:
        raise ConfigError(f"unknown family {name!r}", fix=f"use one of {', '.join(FAMILIES)}")
    candidates: list[tuple[bool, int, list[str], str]] = []
    tried = sorted(FAMILIES.values(), key=lambda family: family.model_type != config.family)
    for family in tried if name is None else [FAMILIES[name]]:
        different = differences(config, family)
        if not different:
            return family
        # A family of another shape, an encoder for a decoder say, becomes no nearer by any key.
        other_shape = different[0].startswith(("shape=", "no such model"))
        # A head that no class of a family has is no distance: other keys tell what the model is.
        distance = sum(not text.startswith("head.kind=") for text in different)
        candidates.append((other_shape, distance, different, family.model_type))
    _, _, different, nearest = min(candidates, key=lambda entry: entry[:2])
    keys = listed(different, _SHOWN)
    sentence = f"{name} does not represent this model exactly; it has"
    if name is None:
        sentence = f"no Hugging Face family represents this model exactly; the nearest, {nearest}, has"
    raise ConfigError(
        f"{sentence} {keys}",
        where="model",
        fix="train with the family's values of these keys; this model can be used by pretrain alone",
    )


def why_not_its_own(config: ModelConfig, chosen: str) -> str:
    """Returns why a model is not exported as its own family; empty: it is, or it has none."""
    if config.family in (None, chosen) or config.family not in FAMILIES:
        return ""
    text = f"a {config.family} does not represent this model any more"
    different = listed(differences(config, FAMILIES[config.family]), _SHOWN)
    return f"exported as {chosen}, since {text}: it has {different}"


def differences(config: ModelConfig, family: Family) -> list[str]:
    """Returns `key=theirs, not ours` of each key that `family` would change."""
    if family.reads != config.reads:
        return [f"no such model: {family.model_type} reads {family.reads}, not {config.reads}"]
    weights = family.weights(config)
    stack = config.last_stack
    if not stack.has_feedforward(stack.layers - 1) and any(".feedforward." in one.ours for one in weights):
        return ["no such model: its layers have a feed-forward layer"]
    names = frozenset(name for weight in weights for name, _ in weight.theirs)
    try:
        written = family.write_config(config) | {"architectures": [family.architecture(config)]}
        theirs = facts(family.read_config(written, names))
    except ConfigError as error:
        return [f"no such model: {error.what}"]
    ours = facts(config)
    texts = {
        key: f"{key}={_shown(theirs.get(key))}, not {_shown(ours.get(key))}"
        for key in dict.fromkeys([*ours, *theirs])
        if ours.get(key) != theirs.get(key)
    }
    unit = unit_of(config)
    if unit and "head.kind" in texts and config.shape == theirs["shape"] == "decoder":
        # Every class of decoders with such a head is known (`with_heads`).
        lacking = family.architecture(config).removesuffix("Model") + unit
        kind = f"{texts['head.kind']} (transformers has no {lacking})"
        return [kind, *(text for key, text in texts.items() if not key.startswith("head."))]
    return list(texts.values())


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return "..."
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def facts(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys that define the function of a model, without those that have no effect.

    Not included: initialisation and dropout, ids of special tokens, padding of the vocabulary.
    """
    values: dict[str, Any] = {"shape": config.shape}
    for name in ("encoder", "decoder"):
        stack = getattr(config, name)
        if stack is not None:
            values |= {f"{name}.{key}": value for key, value in _stack_facts(stack).items()}
            if stack.position == "learned":
                values[f"{name}.position_offset"] = config.first_position(name)
    if config.input is not None:
        of_input = ("kind", "image", "size", "channels", "class_token", "registers")
        values |= {f"input.{key}": getattr(config.input, key) for key in of_input}
    keys = ["vocab_size", "max_seq_len", "tied_embeddings", "scaled_embeddings", "ngram_embeddings"]
    keys += ["pooler", "pooler_activation", "embedding_scale", "multi_token"]
    values |= {key: getattr(config, key) for key in keys} | {"head.kind": config.head.kind}
    for key in config.head.record.settings:
        value = getattr(config.head, key)
        values[f"head.{key}"] = tuple(value) if isinstance(value, list) else value
    if config.head.transform:
        values["head.activation"] = config.head.activation or config.last_stack.activation
    return values


def _expert_facts(stack: StackConfig) -> dict[str, Any]:
    """Returns the width of the feed-forward layers, and what defines their experts."""
    experts = stack.experts
    if experts is None:
        return {"experts": None}
    keys = ["count", "top_k", "shared_gate", "scores", "normalize", "scale", "first"]
    keys += ["groups", "top_groups"]
    values = {f"experts.{key}": getattr(experts, key) for key in keys}
    values |= {"dense_width": stack.ff_width if experts.first else None}
    values |= {"group_scores": experts.group_scores if experts.groups > 1 else None}
    return values | {
        "ff_width": stack.expert_width,
        "experts.shared_width": stack.shared_width,
        "experts.balance": "bias" if experts.balance == "bias" else "loss or none",
    }


_APART: tuple[str, ...] = (
    "kv_heads",
    "head_width",
    "latent",
    "mixers",
    "experts",
    "qkv_bias",
    "output_bias",
    "norm_bias",
    "score_factor",
)
_APART += tuple(MIXERS)
_APART += ("embedding_width", "position_offset", "sinusoid", "rope_", "unrotated_layers", "relative_", "window")
_APART += ("global_", "dropout", "attention_dropout", "drop_path")
"""Beginnings of keys with a default of their own or of no effect on some models; a new key is none of them."""


def _stack_facts(stack: StackConfig) -> dict[str, Any]:
    keys = [key for key in type(stack).model_fields if not key.startswith(_APART)]
    if stack.position == "sinusoidal":
        keys.append("sinusoid")
    if stack.position == "relative":
        keys += ["relative_buckets", "relative_max_distance", "relative_shared"]
    values = {key: getattr(stack, key) for key in keys}
    values |= _expert_facts(stack)
    values |= {"embedding_width": stack.table_width, "kv_heads": stack.num_kv_heads, "head_width": stack.per_head_width}
    if stack.latent is None:
        values["latent"] = None
    else:
        values |= {f"latent.{key}": value for key, value in stack.latent.model_dump().items()}
        values["latent.norm_eps"] = stack.latent.norm_eps or stack.norm_eps
    values |= _mixer_facts(stack)
    values |= {"qkv_bias": stack.has_qkv_bias, "output_bias": stack.has_output_bias}
    values |= {"norm_bias": stack.has_norm_bias}
    values |= {"score_scale": stack.score_scale or stack.per_head_width**-0.5}
    if not stack.has_attention:
        for key in ("heads", "kv_heads", "head_width", "score_scale"):
            del values[key]
    has_window = [window is not None for window in stack.windows]
    if any(has_window):
        values |= {"window": stack.window, "windows": stack.windows}
    if stack.position == "rotary":
        values |= _rotary_facts(stack, has_window)
    return values


def _mixer_facts(stack: StackConfig) -> dict[str, Any]:
    """Returns the mixers of all layers and their sizes; nothing where all are attention."""
    values: dict[str, Any] = {}
    for name in stack.replaced_by:
        sizes = stack.mixer_section(name).sizes(stack.width, stack.heads)
        values |= {f"{name}.{key}": value for key, value in sizes._asdict().items()}
    return values and {"mixers": ", ".join(map(stack.mixer_name, range(stack.layers)))} | values


_SCALING_KEYS = {
    "longrope": ("short_factors", "long_factors", "attention_factor"),
    "llama3": ("original_max_seq_len", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_max_seq_len", "beta_slow", "beta_fast", "attention_factor", "truncate", "score_mscale"),
}
"""Further keys of a `rope_scaling.kind`."""


def _rotary_facts(stack: StackConfig, has_window: list[bool]) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_fraction": stack.rope_fraction}
    # A period counts only where a layer uses it.
    if not all(has_window):
        values["rope_theta"] = stack.rope_theta
    if any(has_window):
        values["rope_local_theta"] = stack.rope_local_theta or stack.rope_theta
    unrotated = sorted(number for number in stack.unrotated_layers if number < stack.layers)
    values["unrotated_layers"] = tuple(unrotated)
    scaling = stack.rope_scaling
    if scaling is None:
        return values | {"rope_scaling.kind": None}
    if any(has_window):
        values["rope_local_scaling"] = stack.rope_local_scaling
    keys = ["kind", "factor", *_SCALING_KEYS.get(scaling.kind, ())]
    if scaling.follows_length:
        keys.insert(2, "original_max_seq_len")
    return values | {f"rope_scaling.{key}": getattr(scaling, key) for key in keys}
