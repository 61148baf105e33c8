"""Keys of heads, windows and rotary positions, as most decoders since LLaMA have them.

Rotary parameters come in the spellings of transformers 4 (`rope_theta`, `rope_scaling`) and 5
(`rope_parameters`), the latter also by the kind of a layer, with a window or without.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from pretrain.config.model import ModelConfig, RotaryScaling, StackConfig
from pretrain.families.config_json import Fields, refusal

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers in `layer_types`."""


@dataclass(frozen=True, slots=True)
class RopeKeys:
    """The differences of a family's rotary embedding."""

    theta: str = "rope_theta"  # key of the period
    share: float | None = None  # default of the share of a head that is rotated; None: all of it
    share_key: str = "partial_rotary_factor"
    kinds: tuple[str, ...] = ("linear", "dynamic", "llama3", "yarn", "longrope")
    renamed: tuple[str, ...] = ()  # kinds that are read as longrope
    # Layers with a window have a period of their own, by this key or fixed, and no scaling.
    local: tuple[str | None, float] | None = None


OF_ONE_LENGTH = RopeKeys(kinds=("linear", "llama3", "yarn", "longrope"))
"""Without the kind that is for sequences of more than `max_position_embeddings`."""


def read_rope(fields: Fields, max_seq_len: int, keys: RopeKeys | None = None) -> dict[str, Any]:
    """Returns periods, scaling and share of the rotary embedding; refuses what ours lack."""
    keys = keys or RopeKeys()
    key = "rope_scaling" if fields.section("rope_scaling") else "rope_parameters"
    values = fields.section(key)
    if {FULL, SLIDING} & values.keys():
        if keys.local is None:
            raise refusal(key, values, "one rotary embedding for all layers can be represented")
        return _read_nested(fields, Fields(values), max_seq_len, keys)
    values_by_key = _read_one(fields, Fields(values), key, max_seq_len, keys)
    if keys.local is not None:
        of_layers, default = keys.local
        local = default if of_layers is None else fields.number(of_layers, default)
        values_by_key |= {"rope_local_theta": local, "rope_local_scaling": values_by_key["rope_scaling"] is None}
    return values_by_key


def _read_nested(fields: Fields, kinds: Fields, max_seq_len: int, keys: RopeKeys) -> dict[str, Any]:
    assert keys.local is not None
    of_layers, default = keys.local
    # transformers looks for this flag beside the kinds of layers, for no length beside the section.
    flag = {"truncate": kinds.flag("truncate", True)}
    parts = {name: kinds.section(name) | flag for name in (FULL, SLIDING)}
    values = fields.values.items()
    fields = Fields({key: value for key, value in values if not key.startswith("original_max")})
    if of_layers is not None:
        default = fields.number(of_layers, default)
    local_theta = Fields(parts[SLIDING]).number("rope_theta", default)
    full, local = (
        _read_one(fields, Fields(parts[kind]), f"rope_parameters.{kind}", max_seq_len, keys) for kind in parts
    )
    scaling = local["rope_scaling"]
    if scaling is not None and scaling != full["rope_scaling"]:
        why = f"only that of {FULL}, or none, can be represented"
        raise refusal(f"rope_parameters.{SLIDING}", kinds.values[SLIDING], why)
    is_scaled = scaling is not None or full["rope_scaling"] is None
    return full | {"rope_local_theta": local_theta, "rope_local_scaling": is_scaled}


def _read_one(
    fields: Fields, rope: Fields, key: str, max_seq_len: int, keys: RopeKeys
) -> dict[str, Any]:  # fmt: skip
    theta = rope.number("rope_theta", fields.number(keys.theta, 10000.0))
    values: dict[str, Any] = {"rope_theta": theta}
    if keys.share is None:
        for holder in (fields, rope):
            holder.only("partial_rotary_factor", 1.0, "a part of each head would not be rotated")
    else:
        share = fields.number(keys.share_key, keys.share)
        values["rope_fraction"] = rope.number("partial_rotary_factor", share)
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    kind = "longrope" if kind in keys.renamed else kind
    if kind == "default":
        return values | {"rope_scaling": None}
    if kind not in keys.kinds:
        why = f"only default, {', '.join(keys.kinds)} can be represented"
        raise refusal(f"{key}.rope_type", kind, why)
    return values | {"rope_scaling": _read_scaling(fields, rope, kind, max_seq_len)}


def _read_scaling(fields: Fields, rope: Fields, kind: str, max_seq_len: int) -> dict[str, Any]:
    scaling: dict[str, Any] = {"kind": kind}
    if kind == "dynamic":
        # Without effect up to this length: theirs has no other limit.
        scaling["original_max_seq_len"] = max_seq_len
    elif kind != "linear":
        length = rope.integer("original_max_position_embeddings", max_seq_len)
        # Theirs prefers the key beside the section.
        scaling["original_max_seq_len"] = fields.integer("original_max_position_embeddings", length)
    if kind in ("yarn", "longrope") and rope.values.get("factor") is None:
        scaling["factor"] = max_seq_len / scaling["original_max_seq_len"]
    else:
        scaling["factor"] = rope.number("factor")
    if kind == "llama3":
        scaling |= {name: rope.number(name) for name in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        scaling |= _read_yarn(rope, scaling["factor"])
    if kind == "longrope":
        scaling |= {f"{name}s": rope.numbers(name) for name in ("short_factor", "long_factor")}
    if kind in ("yarn", "longrope") and rope.values.get("attention_factor") is not None:
        scaling["attention_factor"] = rope.number("attention_factor")
    return scaling


def _read_yarn(rope: Fields, factor: float) -> dict[str, Any]:
    present = {key: value for key, value in rope.values.items() if value is not None}
    rope = Fields({"mscale": 0.0, "mscale_all_dim": 0.0} | present)
    betas = {"beta_slow": 1.0, "beta_fast": 32.0}
    values: dict[str, Any] = {key: rope.number(key, usual) for key, usual in betas.items()}
    if not rope.flag("truncate", True):
        values["truncate"] = False
    mscale, of_all = rope.number("mscale"), rope.number("mscale_all_dim")
    if mscale and of_all:
        growth = 0.1 * math.log(max(1.0, factor))
        values["attention_factor"] = (mscale * growth + 1.0) / (of_all * growth + 1.0)
    return values


def longest(max_seq_len: int, rope: dict[str, Any]) -> int:
    """Returns our `max_seq_len` for their `max_position_embeddings`, which `dynamic` exceeds."""
    scaling = rope["rope_scaling"]
    if scaling and scaling["kind"] == "dynamic":
        return int(max_seq_len * scaling["factor"])
    return max_seq_len


def write_longest(config: ModelConfig) -> dict[str, int]:
    """Returns `max_position_embeddings`, the inverse of `longest`."""
    scaling = config.last_stack.rope_scaling
    is_dynamic = scaling is not None and scaling.kind == "dynamic"
    length = scaling.original_max_seq_len if scaling and is_dynamic else config.max_seq_len
    return {"max_position_embeddings": length}


def write_rope(stack: StackConfig, keys: RopeKeys | None = None) -> dict[str, Any]:
    """Returns the older spelling, which every version reads, or the newer where that cannot say it."""
    keys = keys or RopeKeys()
    scaling = None if stack.rope_scaling is None else _write_scaling(stack.rope_scaling)
    values: dict[str, Any] = {keys.theta: stack.rope_theta, "rope_scaling": scaling}
    if keys.share is not None:
        values[keys.share_key] = stack.rope_fraction
    # Read by every version beside the section, and by some there alone.
    if scaling is not None and scaling["rope_type"] == "longrope":
        values["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    if keys.local is None:
        return values
    key, default = keys.local
    local = stack.rope_local_theta or stack.rope_theta
    if (key is None and local != default) or (scaling is not None and stack.rope_local_scaling):
        full = {"rope_theta": stack.rope_theta, **(scaling or {"rope_type": "default"})}
        sliding = full if stack.rope_local_scaling else {"rope_type": "default"}
        return {"rope_parameters": {FULL: full, SLIDING: {**sliding, "rope_theta": local}}}
    return values if key is None else values | {key: local}


def _write_scaling(scaling: RotaryScaling) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind not in ("linear", "dynamic"):
        values["original_max_position_embeddings"] = scaling.original_max_seq_len
    if scaling.kind == "llama3":
        values["low_freq_factor"] = scaling.low_freq_factor
        values["high_freq_factor"] = scaling.high_freq_factor
    if scaling.kind == "yarn":
        values |= {"beta_slow": scaling.beta_slow, "beta_fast": scaling.beta_fast}
        values |= {} if scaling.truncate else {"truncate": False}
    if scaling.kind == "longrope":
        values |= {"short_factor": scaling.short_factors, "long_factor": scaling.long_factors}
    if scaling.kind in ("yarn", "longrope") and scaling.attention_factor is not None:
        values["attention_factor"] = scaling.attention_factor
    return values


def read_layer_types(
    fields: Fields, layers: int, window: int | None, usual: list[str]
) -> dict[str, Any]:  # fmt: skip
    """Returns the window, and the layers without; `usual` are the `layer_types` of a config without."""
    listed = fields.values.get("layer_types")
    if listed is None:
        listed = usual
    elif not isinstance(listed, list) or len(listed) != layers:
        raise refusal("layer_types", listed, f"must list {layers} layers")
    if unknown := [kind for kind in listed if kind not in (FULL, SLIDING)]:
        raise refusal("layer_types", unknown[0], f"only {FULL} and {SLIDING} can be represented")
    slides = [kind == SLIDING for kind in listed]
    if not any(slides):
        return {}
    if window is None:
        why = f"{SLIDING} needs a sliding_window, and of Qwen use_sliding_window=true"
        raise refusal("layer_types", listed, why)
    return {"window": window, **_global_layers(slides)}


def _global_layers(slides: list[bool]) -> dict[str, Any]:
    # A period reads like a preset; any other set of layers is listed.
    full = [number for number, is_local in enumerate(slides) if not is_local]
    if not full:
        return {}
    for every in range(2, len(slides) + 1):
        first = full[0] % every
        if full == list(range(first, len(slides), every)):
            return {"global_every": every} | ({"global_first": first} if first else {})
    return {"global_layers": full}


def periodic_types(fields: Fields, layers: int, every: int) -> list[str]:
    """Returns the `layer_types` of a config without: every n-th layer has no window."""
    every = fields.integer("sliding_window_pattern", every)
    if every < 1:
        raise refusal("sliding_window_pattern", every, "must be 1 or more")
    return [SLIDING if (number + 1) % every else FULL for number in range(layers)]


def write_layer_types(stack: StackConfig) -> dict[str, list[str]]:
    """Returns the list that `read_layer_types` reads."""
    return {"layer_types": [FULL if window is None else SLIDING for window in stack.windows]}


def read_heads(
    fields: Fields, stack: dict[str, Any], kv_heads: int | None, default_width: int | None = None
) -> dict[str, int | None]:
    """Returns the number of key-value heads and the width of a head, beside `heads` and `width`.

    Those equal to our defaults are None, so that the config reads like a preset.
    """
    head_width = fields.optional_integer("head_dim", default_width)
    if head_width is not None and head_width * stack["heads"] == stack["width"]:
        head_width = None
    return {"kv_heads": None if kv_heads == stack["heads"] else kv_heads, "head_width": head_width}


@cache
def _halves(heads: int, width: int, rotated: int, kept: int) -> tuple[int, ...]:
    inside = (*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, width))
    turned = [head * width + row for head in range(heads) for row in inside]
    return (*turned, *range(len(turned), len(turned) + kept * width))


def halves_order(stack: StackConfig) -> tuple[int, ...]:
    """Returns our rows of queries, keys and values in theirs, where the two of a rotated pair are neighbours."""
    rotated = stack.heads + stack.num_kv_heads
    return _halves(rotated, stack.per_head_width, stack.rotary_width, stack.num_kv_heads)


def qkv_rows(stack: StackConfig) -> tuple[int, int, int]:
    """Returns the rows of the projections of queries, with their gates, keys and values."""
    kv_rows = stack.num_kv_heads * stack.per_head_width
    queries = (1 + stack.attention_gate) * stack.heads * stack.per_head_width
    return queries, kv_rows, kv_rows
