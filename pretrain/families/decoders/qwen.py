"""Qwen 2 and 3 (Yang et al. 2024, 2025): a LLaMA with biases or norms of queries and keys, or with experts.

Qwen 1.5 and 2 with experts (`qwen2_moe`) have a shared one behind a gate.
"""

from typing import Any

from pretrain.config.model import ModelConfig
from pretrain.families.config_json import Fields, refusal
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import LLAMA_MODULES, QK_NORMS, Dialect, decoder_family
from pretrain.families.expert_keys import ExpertKeys, expert_hooks
from pretrain.families.sizes import Architecture, Values

_QWEN2 = Architecture(
    ("decoder",),
    LLAMA_STACK | {"qkv_bias": True, "norm_eps": 1e-6, "rope_theta": 1000000.0},
    {"max_seq_len": 32768, "tied_embeddings": True},
)
"""Yang et al. 2024 (Qwen2), 2.2, table 1; Qwen2.5 has the same shapes."""
_QWEN3 = Architecture(
    ("decoder",),
    LLAMA_STACK
    | {"qk_norm": True, "norm_eps": 1e-6, "rope_theta": 1000000.0}
    | {"kv_heads": 8, "head_width": 128},  # heads are 128 wide at any width of the model
    {"max_seq_len": 32768, "tied_embeddings": True},
)
"""Yang et al. 2025 (Qwen3), 2: a norm of each head instead of the bias of queries, keys and values."""
_QWEN3_MOE = Architecture(
    ("decoder",),
    _QWEN3.stack | {"kv_heads": 4},
    {"max_seq_len": 32768, "tied_embeddings": False},
)
"""Yang et al. 2025 (Qwen3), 2, table 2: of 128 experts a token chooses 8; none is shared."""


def _experts(count: int, top_k: int, width: int) -> Values:
    return {"count": count, "top_k": top_k, "width": width, "balance_weight": 0.001}


_QWEN2_SIZES = {
    "qwen2-0.5b": _QWEN2.size(24, 896, 14, 4864, of=(151936, 494_032_768), kv_heads=2),
    "qwen2-1.5b": _QWEN2.size(28, 1536, 12, 8960, of=(151936, 1_543_714_304), kv_heads=2),
    "qwen2-7b": _QWEN2.size(
        28, 3584, 28, 18944, of=(152064, 7_615_616_512), tied_embeddings=False, kv_heads=4
    ),
    # The release of this size has another eps than the smaller ones.
    "qwen2-72b": _QWEN2.size(
        80, 8192, 64, 29568, of=(152064, 72_706_203_648), tied_embeddings=False, kv_heads=8,
        norm_eps=1e-5,
    ),
    "qwen2-tiny": _QWEN2.size(2, 64, 4, 192, max_seq_len=128, kv_heads=2),
}  # fmt: skip
_QWEN3_SIZES = {
    # Yang et al. 2025, table 1.
    "qwen3-0.6b": _QWEN3.size(28, 1024, 16, 3072, of=(151936, 596_049_920)),
    "qwen3-1.7b": _QWEN3.size(28, 2048, 16, 6144, of=(151936, 1_720_574_976)),
    "qwen3-4b": _QWEN3.size(36, 2560, 32, 9728, of=(151936, 4_022_468_096)),
    "qwen3-8b": _QWEN3.size(36, 4096, 32, 12288, of=(151936, 8_190_735_360), tied_embeddings=False),
    "qwen3-14b": _QWEN3.size(
        40, 5120, 40, 17408, of=(151936, 14_768_307_200), tied_embeddings=False
    ),
    "qwen3-32b": _QWEN3.size(
        64, 5120, 64, 25600, of=(151936, 32_762_123_264), tied_embeddings=False
    ),
    "qwen3-tiny": _QWEN3.size(2, 64, 4, 192, max_seq_len=128, kv_heads=2, head_width=24),
}  # fmt: skip
_MOE_SIZES = {
    # Yang et al. 2025, table 2; by the names of their releases.
    "qwen3_moe-30b-a3b": _QWEN3_MOE.size(
        48, 2048, 32, 6144, of=(151936, 30_532_122_624), experts=_experts(128, 8, 768)
    ),
    "qwen3_moe-235b-a22b": _QWEN3_MOE.size(
        94, 4096, 64, 12288, of=(151936, 235_093_634_560), experts=_experts(128, 8, 1536)
    ),
    "qwen3_moe-tiny": _QWEN3_MOE.size(
        2, 64, 4, 192, max_seq_len=128, kv_heads=2, head_width=24, experts=_experts(8, 2, 48)
    ),
}  # fmt: skip
_QWEN2_MOE = Architecture(("decoder",), _QWEN2.stack, {"max_seq_len": 8192, "tied_embeddings": False})
"""Qwen team 2024 (Qwen1.5-MoE): weights of the chosen experts are their scores."""
_SHARED = {"shared": 1, "shared_gate": True, "normalize": False, "balance_weight": 0.001}
_MOE2_SIZES = {
    "qwen2_moe-14b-a2.7b": _QWEN2_MOE.size(
        24, 2048, 16, 5632, of=(151936, 14_315_784_192),
        experts={"count": 60, "top_k": 4, "width": 1408, "shared_width": 5632, **_SHARED},
    ),
    "qwen2_moe-tiny": _QWEN2_MOE.size(
        2, 64, 4, 192, max_seq_len=128, kv_heads=2,
        experts={"count": 4, "top_k": 2, "width": 48, "shared_width": 80, **_SHARED},
    ),
}  # fmt: skip
_MOE_KEYS = ExpertKeys(
    ("num_local_experts", "num_experts"), (128, 8), "mlp", "gate_proj", "up_proj", "down_proj",
    width=("moe_intermediate_size", 768), mixed=True,
)  # fmt: skip
_MOE2_KEYS = ExpertKeys(
    ("num_local_experts", "num_experts"), (60, 4), "mlp", "gate_proj", "up_proj", "down_proj",
    width=("moe_intermediate_size", 1408), mixed=True, shared="shared_expert",
    shared_width=("shared_expert_intermediate_size", 5632),
)  # fmt: skip
_DEFAULTS = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
_NORMED_MODULES = {**LLAMA_MODULES, **QK_NORMS}


def _read_moe2(fields: Fields) -> dict[str, Any]:
    if not fields.flag("use_sliding_window", False):
        fields.values["sliding_window"] = None
    elif fields.values.get("layer_types") is None:
        layers = fields.integer("num_hidden_layers", 24)
        if fields.integer("max_window_layers", 28) < layers:
            why = f"without layer_types only {layers} or more can be represented"
            raise refusal("max_window_layers", fields.values["max_window_layers"], why)
    return _MOE2_KEYS.read(fields)


def _write_moe2(config: ModelConfig) -> dict[str, Any]:
    slides = any(window is not None for window in config.last_stack.windows)
    return _MOE2_KEYS.write(config) | {"use_sliding_window": slides}


FAMILIES = tuple(
    decoder_family(dialect)
    for dialect in (
        Dialect(
            model_type="qwen2", name="Qwen2", sizes=_QWEN2_SIZES, answers="transformer.",
            windows="listed", defaults=_DEFAULTS, kv_heads=32, built_in={"qkv_bias": True},
        ),
        Dialect(
            model_type="qwen2_moe", name="Qwen2Moe", sizes=_MOE2_SIZES, answers="model.", kv_heads=16,
            windows=lambda number: number % 2 > 0, more={"qkv_bias": ("qkv_bias", True)},
            defaults={
                "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24,
                "num_attention_heads": 16, "max_position_embeddings": 32768,
            },
            missing={"intermediate_size": 5632},
            **(expert_hooks(_MOE2_KEYS, LLAMA_MODULES) | {"read": _read_moe2, "write": _write_moe2}),
        ),
        Dialect(
            model_type="qwen3", name="Qwen3", sizes=_QWEN3_SIZES, answers="transformer.",
            windows="listed", defaults=_DEFAULTS, kv_heads=32, head_width=128,
            built_in={"qk_norm": True}, biases=("attention_bias",),
            modules=lambda config: _NORMED_MODULES,
        ),
        Dialect(
            model_type="qwen3_moe", name="Qwen3Moe", sizes=_MOE_SIZES, answers="transformer.",
            windows="flagged", kv_heads=4,
            defaults={
                "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24,
                "max_position_embeddings": 32768,
            },
            built_in={"qk_norm": True}, missing={"intermediate_size": 6144},
            refused={"attention_bias": (False, "the attention layers would have biases, and experts none")},
            **expert_hooks(_MOE_KEYS, _NORMED_MODULES),
        ),
    )
)  # fmt: skip
