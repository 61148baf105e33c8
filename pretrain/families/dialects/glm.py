"""GLM 4 (GLM team 2024) and its second release of 2025: half of a head is rotated, biases of queries, keys and values.

Neighbouring dimensions are rotated, which here are a half apart. The second has norms of outputs too.

GLM 4.5 (2025) has halves and the experts of DeepSeek-V3, GLM 4.7 Flash its latent attention too.
"""

from dataclasses import replace
from typing import Any

from pretrain.config.model import ModelConfig
from pretrain.families.config_json import Fields, Keys
from pretrain.families.decoders.deepseek import V3_EXPERTS, latent_hooks, with_predictors
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import LLAMA_MODULES, QK_NORMS, Dialect, decoder_family
from pretrain.families.rotary_keys import RopeKeys, halves_order
from pretrain.families.sizes import Architecture, Values

_GLM = Architecture(
    ("decoder",),
    LLAMA_STACK | {"kv_heads": 2, "qkv_bias": True, "norm_eps": 1.5625e-7, "rope_fraction": 0.5},
    {"max_seq_len": 131072, "tied_embeddings": False, "family": "glm"},
)
_GLM4 = Architecture(
    ("decoder",),
    _GLM.stack | {"norm_placement": "sandwich", "norm_eps": 1e-5},
    _GLM.ends | {"max_seq_len": 32768, "family": "glm4"},
)
_GLM_SIZES = {
    "glm-4-9b": _GLM.size(40, 4096, 32, 13696, of=(151552, 9_399_951_360)),
    "glm-tiny": _GLM.size(2, 64, 4, 192, max_seq_len=128),
}
_GLM4_SIZES = {
    "glm4-9b": _GLM4.size(40, 4096, 32, 13696, of=(151552, 9_400_279_040)),
    "glm4-32b": _GLM4.size(
        61, 6144, 48, 23040, of=(151552, 32_566_081_536), head_width=128, qkv_bias=False
    ),
    "glm4-tiny": _GLM4.size(2, 64, 4, 192, max_seq_len=128, head_width=24),
}  # fmt: skip
_GLM_MOE = Architecture(
    ("decoder",),
    LLAMA_STACK | {"kv_heads": 8, "qkv_bias": True, "rope_theta": 1e6, "rope_fraction": 0.5},
    {"max_seq_len": 131072, "tied_embeddings": False},
)
_GLM_LITE = Architecture(
    ("decoder",),
    LLAMA_STACK | {"head_width": 256, "rope_theta": 1e6},
    {"max_seq_len": 202752, "tied_embeddings": False, "family": "glm4_moe_lite"},
)


def _experts(count: int, top_k: int, width: int, scale: float) -> Values:
    kinds = {"scores": "sigmoid", "balance": "bias", "scale": scale, "shared": 1, "first": 1}
    return {"count": count, "top_k": top_k, "width": width, **kinds}


_GLM_MOE_SIZES = {
    # Without their modules of further tokens.
    "glm4_moe-air": _GLM_MOE.size(
        46, 4096, 96, 10944, of=(151552, 106_852_245_504), head_width=128,
        experts=_experts(128, 8, 1408, 1.0),
    ),
    "glm4_moe-tiny": _GLM_MOE.size(
        2, 64, 4, 192, max_seq_len=128, kv_heads=2, head_width=24, experts=_experts(4, 2, 48, 1.5)
    ),
}  # fmt: skip
_GLM_LITE_SIZES = {
    "glm4_moe_lite-flash": _GLM_LITE.size(
        47, 2048, 20, 10240, of=(154880, 29_943_390_976), experts=_experts(64, 4, 1536, 1.8),
        latent={"query_rank": 768, "kv_rank": 512, "rope_width": 64, "value_width": 256, "norm_eps": 1e-6},
    ),
    "glm4_moe_lite-tiny": _GLM_LITE.size(
        2, 64, 4, 192, max_seq_len=128, head_width=24, experts=_experts(4, 2, 48, 1.8),
        latent={"query_rank": 32, "kv_rank": 24, "rope_width": 8, "value_width": 16, "norm_eps": 1e-6},
    ),
}  # fmt: skip
_MODULES = {**LLAMA_MODULES, "feedforward.gate_up": ("mlp.gate_up_proj",)}
_SANDWICH = _MODULES | {
    "attention_output_norm": ("post_self_attn_layernorm",),
    "feedforward_output_norm": ("post_mlp_layernorm",),
}
_ALL: dict[str, Any] = {
    "kv_heads": 2, "head_width": 128, "tokens": {"pad": 151329, "eos": 151329}, "order": halves_order,
    "rope": RopeKeys(share=0.5), "more": {"attention_bias": ("qkv_bias", True)},
    "defaults": {
        "vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40,
        "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7,
    },
}  # fmt: skip

_CHOICE: Keys = {"n_group": ("groups", 1), "topk_group": ("top_groups", 1), "norm_topk_prob": ("normalize", True)}
_MOE_EXPERTS = replace(
    V3_EXPERTS, defaults=(128, 8), width=("moe_intermediate_size", 1408),
    more={
        **_CHOICE, "n_shared_experts": ("shared", 1), "first_k_dense_replace": ("first", 1),
        "routed_scaling_factor": ("scale", 1.0),
    },
)  # fmt: skip
_LITE_EXPERTS = replace(
    V3_EXPERTS, defaults=(64, 4), width=("moe_intermediate_size", 1536), listed=True,
    more={**_CHOICE, "n_shared_experts": ("shared", 1), "routed_scaling_factor": ("scale", 1.8)},
    built_in={"first": 1},
)  # fmt: skip


def _read_moe(fields: Fields) -> dict[str, Any]:
    width, heads = fields.integer("hidden_size", 4096), fields.integer("num_attention_heads", 96)
    if fields.values.get("head_dim") is None and heads > 0 and width % heads:
        fields.values["head_dim"] = 128  # as released; transformers rounds down
    return _MOE_EXPERTS.read(fields) | {"qk_norm": fields.flag("use_qk_norm", False)}


def _write_moe(config: ModelConfig) -> dict[str, Any]:
    return _MOE_EXPERTS.write(config) | {"use_qk_norm": bool(config.last_stack.qk_norm)}


def _moe_modules(config: ModelConfig) -> dict[str, Any]:
    norms = QK_NORMS if config.last_stack.qk_norm else {}
    return _MOE_EXPERTS.modules({**LLAMA_MODULES, **norms}, config)


_MOE = Dialect(
    model_type="glm4_moe", name="Glm4Moe", sizes=_GLM_MOE_SIZES, labels=False, kv_heads=8,
    rope=RopeKeys(share=0.5), more={"attention_bias": ("qkv_bias", False)},
    read=_read_moe, write=_write_moe, modules=_moe_modules, further=_MOE_EXPERTS.further,
    missing={"intermediate_size": 10944},
    defaults={
        "vocab_size": 151552, "num_hidden_layers": 46, "num_attention_heads": 96,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    },
)  # fmt: skip
_LITE = Dialect(
    model_type="glm4_moe_lite", name="Glm4MoeLite", sizes=_GLM_LITE_SIZES, labels=False,
    tokens={"bos": 0, "eos": 1},
    missing={
        "intermediate_size": 10240, "hidden_size": 2048, "num_attention_heads": 20,
        "num_hidden_layers": 47, "q_lora_rank": 768, "v_head_dim": 256, "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-5,
    },
    defaults={"vocab_size": 154880, "max_position_embeddings": 202752},
    **latent_hooks(_LITE_EXPERTS, 202752),
)  # fmt: skip

FAMILIES = (
    *(with_predictors(dialect) for dialect in (_MOE, _LITE)),
    *(decoder_family(dialect) for dialect in (
        Dialect(
            model_type="glm", name="Glm", sizes=_GLM_SIZES, modules=lambda config: _MODULES, **_ALL
        ),
        Dialect(
            model_type="glm4", name="Glm4", sizes=_GLM4_SIZES, modules=lambda config: _SANDWICH,
            built_in={"norm_placement": "sandwich"}, **_ALL,
        ),
    )),
)  # fmt: skip
