"""GLM 4 (GLM team 2024) and its second release of 2025: half of a head is rotated, biases of queries, keys and values.

Neighbouring dimensions are rotated, which here are a half apart. The second has norms of outputs too.
"""

from typing import Any

from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import LLAMA_MODULES, Dialect, decoder_family
from pretrain.families.rotary_keys import RopeKeys, halves_order
from pretrain.families.sizes import Architecture

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

FAMILIES = tuple(
    decoder_family(dialect)
    for dialect in (
        Dialect(
            model_type="glm", name="Glm", sizes=_GLM_SIZES, modules=lambda config: _MODULES, **_ALL
        ),
        Dialect(
            model_type="glm4", name="Glm4", sizes=_GLM4_SIZES, modules=lambda config: _SANDWICH,
            built_in={"norm_placement": "sandwich"}, **_ALL,
        ),
    )
)  # fmt: skip
