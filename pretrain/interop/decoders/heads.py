"""Keys of heads and rotary positions, and their tensors, as most decoders since LLaMA have them.

Rotary parameters come in the spellings of transformers 4 (`rope_theta`, `rope_scaling`) and 5
(`rope_parameters`).
"""

from typing import Any

from pretrain.config.model import StackConfig
from pretrain.interop.fields import Fields, refusal

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers in `layer_types`."""

ROTARY_BUFFERS = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"


def read_rope(fields: Fields, max_seq_len: int) -> dict[str, Any]:
    """Returns period and scaling of the rotary embedding of all layers; refuses what ours lack."""
    key = "rope_scaling" if fields.section("rope_scaling") else "rope_parameters"
    rope = Fields(fields.section(key))
    if {FULL, SLIDING} & rope.values.keys():
        raise refusal(key, rope.values, "one rotary embedding for all layers can be represented")
    for holder in (fields, rope):
        holder.only("partial_rotary_factor", 1.0, "a part of each head would not be rotated")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind not in ("linear", "llama3", "yarn"):
        raise refusal(f"{key}.rope_type", kind, "only default, linear, llama3 and yarn can be represented")
    scaling: dict[str, Any] = {"kind": kind, "factor": rope.number("factor")}
    if kind != "linear":
        length = rope.integer("original_max_position_embeddings", max_seq_len)
        scaling["original_max_seq_len"] = fields.integer("original_max_position_embeddings", length)
    if kind == "llama3":
        scaling |= {name: rope.number(name) for name in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        scaling |= {"beta_slow": rope.number("beta_slow", 1.0), "beta_fast": rope.number("beta_fast", 32.0)}
        if rope.values.get("attention_factor") is not None:
            scaling["attention_factor"] = rope.number("attention_factor")
        if not rope.flag("truncate", True):
            scaling["truncate"] = False
        for name in ("mscale", "mscale_all_dim"):
            rope.only(name, None, "scores would have another factor; give it as attention_factor")
    return {"rope_theta": theta, "rope_scaling": scaling}


def write_rope(stack: StackConfig) -> dict[str, Any]:
    """Returns `rope_theta` and `rope_scaling`: the older spelling, which every version reads."""
    scaling = stack.rope_scaling
    if scaling is None:
        return {"rope_theta": stack.rope_theta, "rope_scaling": None}
    values: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        values["original_max_position_embeddings"] = scaling.original_max_seq_len
    if scaling.kind == "llama3":
        values |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        values |= {"beta_slow": scaling.beta_slow, "beta_fast": scaling.beta_fast}
        values |= {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
        values |= {} if scaling.truncate else {"truncate": False}
    return {"rope_theta": stack.rope_theta, "rope_scaling": values}


def read_layer_types(fields: Fields, layers: int, window: int | None, usual: list[str]) -> dict[str, int | None]:
    """Returns the window, and which layers have none; `usual` are the `layer_types` of a config without."""
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
        why = f"{SLIDING} needs use_sliding_window=true and a sliding_window"
        raise refusal("layer_types", listed, why)
    if all(slides):
        return {"window": window}
    for every in range(2, layers + 1):
        for first in range(every):
            if slides == [number % every != first for number in range(layers)]:
                found: dict[str, int | None] = {"window": window, "global_every": every}
                return found | ({"global_first": first} if first else {})
    # A period of layers without a window is all that `global_every` expresses.
    raise refusal("layer_types", listed, "only every n-th layer can lack a window")


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


def qkv_rows(stack: StackConfig) -> dict[str, int]:
    """Returns the rows of the projections of queries, keys and values, by their names."""
    kv_rows = stack.num_kv_heads * stack.per_head_width
    rows = {"q": stack.heads * stack.per_head_width, "k": kv_rows, "v": kv_rows}
    return {f"self_attn.{part}_proj": number for part, number in rows.items()}
