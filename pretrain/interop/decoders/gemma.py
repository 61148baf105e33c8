"""Gemma 1, 2 and 3 (Gemma Team 2024, 2024, 2025): norms that scale by one plus their weight.

Embeddings are multiplied by sqrt(D). Gemma 2 adds norms of the outputs of sub-layers, soft caps and
windows in every other layer; Gemma 3 norms of queries and keys, windows in five of six layers, and a
period of its own in these.
"""

from typing import Any

from pretrain.config.model import ModelConfig
from pretrain.interop.decoders.dialect import LLAMA_MODULES, QK_NORMS, Dialect, decoder_family
from pretrain.interop.decoders.heads import RopeKeys
from pretrain.interop.fields import Fields, refusal

_BUILT_IN = {"norm_offset": True, "activation": "gelu_tanh"}
_SANDWICH = _BUILT_IN | {"norm_placement": "sandwich"}
_SANDWICH_MODULES = {
    **LLAMA_MODULES,
    "attention_output_norm": ("post_attention_layernorm",),
    "feedforward_norm": ("pre_feedforward_layernorm",),
    "feedforward_output_norm": ("post_feedforward_layernorm",),
}
_SIZES = {"max_position_embeddings": 8192, "tie_word_embeddings": True, "vocab_size": 256000}
_SIZES_2 = _SIZES | {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
_SIZES_2 |= {"num_attention_heads": 8}
_TOKENS = {"pad": 0, "bos": 2, "eos": 1}
_REFUSED = {"use_bidirectional_attention": (None, "tokens would see those after them")}


def _read(fields: Fields) -> dict[str, Any]:
    # transformers takes it for the approximation, which the releases mean.
    if fields.values.get("hidden_act") == "gelu":
        fields.values["hidden_act"] = "gelu_pytorch_tanh"
    if fields.values.get("use_bidirectional_attention") is False:
        del fields.values["use_bidirectional_attention"]
    return {"model.scaled_embeddings": True}


def _read_capped(fields: Fields) -> dict[str, Any]:
    scalar = fields.number("query_pre_attn_scalar", 256)
    if scalar <= 0:
        raise refusal("query_pre_attn_scalar", scalar, "must be more than 0")
    found = _read(fields) | {"score_factor": scalar**-0.5}
    caps = {"attn_logit_softcapping": "score_cap", "final_logit_softcapping": "head.soft_cap"}
    for key, ours in caps.items():
        found[ours] = None if fields.values.get(key) is None else fields.number(key)
    return found


def _write_capped(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    # Rounded, as they are whole numbers as released.
    scalar = float(f"{(stack.score_scale or stack.per_head_width**-0.5) ** -2:.12g}")
    return {
        "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,
        "attn_logit_softcapping": stack.score_cap,
        "final_logit_softcapping": config.head.soft_cap,
    }


GEMMA, GEMMA2, GEMMA3 = map(
    decoder_family,
    (
        Dialect(
            model_type="gemma", name="Gemma", biases=("attention_bias",), kv_heads=16,
            head_width=256, tokens=_TOKENS,
            sizes=_SIZES | {"hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28}
            | {"num_attention_heads": 16},
            built_in=_BUILT_IN, refused=_REFUSED, read=_read,
        ),
        Dialect(
            model_type="gemma2", name="Gemma2", biases=("attention_bias",), kv_heads=4,
            head_width=256, tokens=_TOKENS,
            sizes=_SIZES_2, spelled={"hidden_act": "hidden_activation"}, windows=2, divides=True,
            missing={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            built_in=_SANDWICH, refused=_REFUSED, read=_read_capped, write=_write_capped,
            modules=lambda config: _SANDWICH_MODULES,
        ),
        Dialect(
            model_type="gemma3_text", name="Gemma3", base="Gemma3TextModel",
            biases=("attention_bias",), kv_heads=4,
            head_width=256, tokens=_TOKENS,
            sizes=_SIZES_2 | {"vocab_size": 262208, "max_position_embeddings": 131072},
            spelled={"hidden_act": "hidden_activation"}, windows=6, divides=True,
            missing={"rope_theta": 1e6},
            rope=RopeKeys(local=("rope_local_base_freq", 10000.0)),
            built_in=_SANDWICH | {"qk_norm": True},
            # A key of its config that no layer reads.
            refused=_REFUSED | {"attn_logit_softcapping": (None, "transformers' Gemma 3 does not cap scores")},
            read=_read_capped, write=_write_capped,
            modules=lambda config: _SANDWICH_MODULES | QK_NORMS,
        ),
    ),
)  # fmt: skip
