"""Rotary parameters of a config.json, in the spellings of transformers 4 (`rope_theta`, `rope_scaling`) and 5."""

from typing import Any

from pretrain.config.model import StackConfig
from pretrain.interop.fields import Fields, refusal

DEFAULT_THETA = 10000.0
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def read_rope(fields: Fields, max_seq_len: int) -> tuple[float, dict[str, Any] | None]:
    """Returns the base period and the scaling (values of `RotaryScaling`) of one rotary embedding for all layers.

    Raises:
        ConfigError: A kind of scaling, or a part of a head that is not rotated, which ours cannot do.
    """
    key = "rope_scaling" if fields.section("rope_scaling") else "rope_parameters"
    rope = Fields(fields.section(key))
    if _LAYER_TYPES & rope.values.keys():
        raise refusal(key, rope.values, "one rotary embedding for all layers can be represented")
    for holder in (fields, rope):
        holder.only("partial_rotary_factor", 1.0, "a part of each head would not be rotated")
    theta = rope.number("rope_theta", fields.number("rope_theta", DEFAULT_THETA))
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, {"kind": "linear", "factor": rope.number("factor")}
    if kind != "llama3":
        raise refusal(f"{key}.rope_type", kind, "only default, linear and llama3 can be represented")
    length = rope.integer("original_max_position_embeddings", max_seq_len)
    return theta, {
        "kind": "llama3",
        "factor": rope.number("factor"),
        "original_max_seq_len": fields.integer("original_max_position_embeddings", length),
        "low_freq_factor": rope.number("low_freq_factor"),
        "high_freq_factor": rope.number("high_freq_factor"),
    }


def write_rope(stack: StackConfig) -> dict[str, Any]:
    """Returns `rope_theta` and `rope_scaling`: the older spelling, which every version reads."""
    scaling = stack.rope_scaling
    if scaling is None:
        return {"rope_theta": stack.rope_theta, "rope_scaling": None}
    values: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        values |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    return {"rope_theta": stack.rope_theta, "rope_scaling": values}
