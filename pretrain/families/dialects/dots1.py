"""dots.llm1 (rednote 2025) and Solar Open (Upstage 2025): the experts of DeepSeek-V3 over ordinary attention.

dots.llm1 has norms of queries and keys, and may have windows in its last layers.
"""

from dataclasses import replace
from typing import Any

from pretrain.families.config_json import Fields, Keys
from pretrain.families.decoders.deepseek import V3_EXPERTS
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import LLAMA_MODULES, QK_NORMS, Dialect, decoder_family
from pretrain.families.expert_keys import expert_hooks
from pretrain.families.rotary_keys import FULL, SLIDING
from pretrain.families.sizes import Architecture, Values

_DOTS1 = Architecture(
    ("decoder",),
    LLAMA_STACK | {"qk_norm": True, "rope_theta": 10000000.0},
    {"max_seq_len": 32768, "tied_embeddings": False, "family": "dots1"},
)
_SOLAR = Architecture(
    ("decoder",),
    LLAMA_STACK | {"kv_heads": 8, "head_width": 128, "rope_theta": 1000000.0},
    {"max_seq_len": 131072, "tied_embeddings": False, "family": "solar_open"},
)


def _experts(count: int, top_k: int, width: int | None, **other: Any) -> Values:
    kinds = {"scores": "sigmoid", "balance": "bias"}
    return {"count": count, "top_k": top_k, "width": width, **kinds, **other}


_DOTS1_SIZES = {
    "dots1-142b": _DOTS1.size(
        62, 4096, 32, 10944, of=(152064, 142_774_373_888),
        experts=_experts(128, 6, 1408, shared=2, first=1, scale=2.5),
    ),
    "dots1-tiny": _DOTS1.size(
        2, 64, 4, 192, max_seq_len=128, kv_heads=2, experts=_experts(4, 2, 48, shared=1, first=1)
    ),
}  # fmt: skip
_SOLAR_SIZES = {
    "solar_open-100b": _SOLAR.size(
        48, 4096, 64, 1280, of=(196608, 102_651_793_408), experts=_experts(128, 8, None, shared=1)
    ),
    "solar_open-tiny": _SOLAR.size(
        2, 64, 4, 48, max_seq_len=128, kv_heads=2, head_width=24, experts=_experts(4, 2, None, shared=1)
    ),
}  # fmt: skip
_CHOICE: Keys = {
    "n_group": ("groups", 1),
    "topk_group": ("top_groups", 1),
    "routed_scaling_factor": ("scale", 1.0),
    "n_shared_experts": ("shared", 1),
}
_DOTS1_EXPERTS = replace(
    V3_EXPERTS, defaults=(128, 6), width=("moe_intermediate_size", 1408),
    more={**_CHOICE, "norm_topk_prob": ("normalize", False), "first_k_dense_replace": ("first", 0)},
)  # fmt: skip
_SOLAR_EXPERTS = replace(
    V3_EXPERTS, defaults=(128, 8), width=("moe_intermediate_size", 1280),
    more={**_CHOICE, "norm_topk_prob": ("normalize", True)},
)  # fmt: skip


def _read_dots1(fields: Fields) -> dict[str, Any]:
    # Nulls are transformers' own defaults, with which it has no model.
    for key in [*_DOTS1_EXPERTS.more, "n_routed_experts", "num_experts_per_tok"]:
        if fields.values.get(key) is None:
            fields.values.pop(key, None)
    if fields.values.get("layer_types") is None:
        full = fields.integer("max_window_layers", 62)
        layers = range(fields.integer("num_hidden_layers", 62))
        slides = fields.values.get("sliding_window", 4096) is not None
        fields.values["layer_types"] = [SLIDING if slides and one >= full else FULL for one in layers]
    return _DOTS1_EXPERTS.read(fields)


def _read_solar(fields: Fields) -> dict[str, Any]:
    # It has no dense layers.
    width = fields.values["intermediate_size"] = fields.integer("moe_intermediate_size", 1280)
    return _SOLAR_EXPERTS.read(fields) | {"ff_width": width}


FAMILIES = tuple(
    decoder_family(dialect)
    for dialect in (
        Dialect(
            model_type="dots1", name="Dots1", sizes=_DOTS1_SIZES, labels=False, kv_heads=32,
            windows=lambda number: True, built_in={"qk_norm": True}, missing={"intermediate_size": 10944},
            biases=("attention_bias",),
            defaults={"vocab_size": 152064, "hidden_size": 4608, "num_hidden_layers": 62},
            **expert_hooks(_DOTS1_EXPERTS, {**LLAMA_MODULES, **QK_NORMS}) | {"read": _read_dots1},
        ),
        Dialect(
            model_type="solar_open", name="SolarOpen", sizes=_SOLAR_SIZES, labels=False, kv_heads=8,
            head_width=128, more={"attention_bias": ("qkv_bias", False)},
            spelled={"intermediate_size": None}, missing={"rope_theta": 1e6},
            defaults={
                "vocab_size": 196608, "num_hidden_layers": 48, "num_attention_heads": 64,
                "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            },
            **expert_hooks(_SOLAR_EXPERTS, LLAMA_MODULES) | {"read": _read_solar},
        ),
    )
)  # fmt: skip
