"""Gemma 1 to 3 and VaultGemma (Gemma Team 2024, 2024, 2025, 2025): norms that scale by one plus their weight.

Embeddings are multiplied by sqrt(D). Gemma 2 adds norms of the outputs of sub-layers, soft caps and
windows in every other layer; Gemma 3 norms of queries and keys, windows in five of six layers, and a
period of its own in these. VaultGemma is a Gemma 2 without norms of outputs.
"""

from typing import Any

from pretrain.config.model import ModelConfig
from pretrain.families.config_json import Fields, refusal
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import LLAMA_MODULES, QK_NORMS, Dialect, decoder_family
from pretrain.families.rotary_keys import RopeKeys
from pretrain.families.sizes import Architecture

_GEMMA = Architecture(
    ("decoder",),
    LLAMA_STACK | {"activation": "gelu_tanh", "norm_eps": 1e-6, "norm_offset": True, "head_width": 256},
    {"max_seq_len": 8192, "tied_embeddings": True, "scaled_embeddings": True},
)
"""Gemma Team 2024, 2, table 1; the approximation of GELU as released."""
_GEMMA2 = Architecture(
    ("decoder",),
    _GEMMA.stack
    | {"norm_placement": "sandwich", "score_cap": 50.0, "score_factor": 256**-0.5}
    | {"window": 4096, "global_every": 2, "global_first": 1},
    _GEMMA.ends | {"head": {"soft_cap": 30.0}},
)
"""Gemma Team 2024 (Gemma 2), 2, table 1."""
_VAULT = Architecture(
    ("decoder",),
    {**_GEMMA2.stack, "norm_placement": "pre", "window": 512},
    _GEMMA2.ends | {"max_seq_len": 1024},
)
"""Gemma Team 2025 (VaultGemma), as released."""
_GEMMA3 = Architecture(
    ("decoder",),
    _GEMMA.stack
    | {"norm_placement": "sandwich", "qk_norm": True, "score_factor": 256**-0.5}
    | {"rope_theta": 1000000.0, "rope_local_theta": 10000.0, "rope_local_scaling": False}
    | {"window": 1024, "global_every": 6, "global_first": 5},
    _GEMMA.ends | {"max_seq_len": 131072},
)
"""Gemma Team 2025 (Gemma 3), 2, table 1; windows of the two smallest as released."""
_EIGHTFOLD = {"kind": "linear", "factor": 8.0}
_GEMMA_SIZES = {
    # Gemma Team 2024, table 1: one key-value head in the smaller one.
    "gemma-2b": _GEMMA.size(18, 2048, 8, 16384, of=(256000, 2_506_172_416), kv_heads=1),
    "gemma-7b": _GEMMA.size(28, 3072, 16, 24576, of=(256000, 8_537_680_896)),
    "gemma-tiny": _GEMMA.size(2, 64, 4, 192, max_seq_len=128, kv_heads=1, head_width=24),
}
_GEMMA2_SIZES = {
    "gemma2-2b": _GEMMA2.size(26, 2304, 8, 9216, of=(256000, 2_614_341_888), kv_heads=4),
    "gemma2-9b": _GEMMA2.size(42, 3584, 16, 14336, of=(256000, 9_241_705_984), kv_heads=8),
    "gemma2-27b": _GEMMA2.size(
        46, 4608, 32, 36864, of=(256000, 27_227_128_320), kv_heads=16, head_width=128, score_factor=144**-0.5
    ),
    "gemma2-tiny": _GEMMA2.size(
        2, 64, 4, 192, max_seq_len=128, kv_heads=2, head_width=24, window=16
    ),
}  # fmt: skip
_VAULT_SIZES = {
    "vaultgemma-1b": _VAULT.size(26, 1152, 4, 6912, of=(256000, 1_038_741_120)),
    "vaultgemma-tiny": _VAULT.size(2, 64, 4, 192, max_seq_len=128, head_width=24, window=16),
}
_GEMMA3_SIZES = {
    # Gemma Team 2025, table 1, without the encoder of images; of the larger ones the longer context.
    "gemma3-270m": _GEMMA3.size(
        18, 640, 4, 2048, of=(262144, 268_098_176), kv_heads=1, window=512, max_seq_len=32768
    ),
    "gemma3-1b": _GEMMA3.size(
        26, 1152, 4, 6912, of=(262144, 999_885_952), kv_heads=1, window=512, max_seq_len=32768
    ),
    "gemma3-4b": _GEMMA3.size(
        34, 2560, 8, 10240, of=(262144, 3_880_099_328), kv_heads=4, rope_scaling=_EIGHTFOLD
    ),
    "gemma3-12b": _GEMMA3.size(
        48, 3840, 16, 15360, of=(262144, 11_765_788_416), kv_heads=8, rope_scaling=_EIGHTFOLD
    ),
    "gemma3-27b": _GEMMA3.size(
        62,
        5376,
        32,
        21504,
        of=(262144, 27_009_002_240),
        kv_heads=16,
        head_width=128,
        score_factor=168**-0.5,
        rope_scaling=_EIGHTFOLD,
    ),
    "gemma3-tiny": _GEMMA3.size(
        6, 64, 4, 192, max_seq_len=128, kv_heads=2, head_width=24, window=16
    ),
}  # fmt: skip
_BUILT_IN = {"norm_offset": True, "activation": "gelu_tanh"}
_SANDWICH = _BUILT_IN | {"norm_placement": "sandwich"}
_SANDWICH_MODULES = {
    **LLAMA_MODULES,
    "attention_output_norm": ("post_attention_layernorm",),
    "feedforward_norm": ("pre_feedforward_layernorm",),
    "feedforward_output_norm": ("post_feedforward_layernorm",),
}
_VAULT_MODULES = {**LLAMA_MODULES, "feedforward_norm": ("pre_feedforward_layernorm",)}
_DEFAULTS = {"max_position_embeddings": 8192, "tie_word_embeddings": True, "vocab_size": 256000}
_DEFAULTS_2 = _DEFAULTS | {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
_DEFAULTS_2 |= {"num_attention_heads": 8}
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
    values = _read(fields) | {"score_factor": scalar**-0.5}
    caps = {"attn_logit_softcapping": "score_cap", "final_logit_softcapping": "head.soft_cap"}
    for key, ours in caps.items():
        values[ours] = None if fields.values.get(key) is None else fields.number(key)
    return values


def _write_capped(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    # Rounded, as they are whole numbers as released.
    scalar = float(f"{(stack.score_scale or stack.per_head_width**-0.5) ** -2:.12g}")
    return {
        "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,
        "attn_logit_softcapping": stack.score_cap,
        "final_logit_softcapping": config.head.soft_cap,
    }


FAMILIES = tuple(
    decoder_family(dialect)
    for dialect in (
        Dialect(
            model_type="gemma", sizes=_GEMMA_SIZES, name="Gemma",
            biases=("attention_bias",), kv_heads=16,
            head_width=256, tokens=_TOKENS,
            defaults=_DEFAULTS | {"hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28}
            | {"num_attention_heads": 16},
            built_in=_BUILT_IN, refused=_REFUSED, read=_read,
        ),
        Dialect(
            model_type="gemma2", sizes=_GEMMA2_SIZES, name="Gemma2",
            biases=("attention_bias",), kv_heads=4,
            head_width=256, tokens=_TOKENS,
            defaults=_DEFAULTS_2, spelled={"hidden_act": "hidden_activation"}, windows=2, divides=True,
            missing={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            built_in=_SANDWICH, refused=_REFUSED, read=_read_capped, write=_write_capped,
            modules=lambda config: _SANDWICH_MODULES,
        ),
        Dialect(
            model_type="vaultgemma", name="VaultGemma", sizes=_VAULT_SIZES, labels=False,
            biases=("attention_bias",), kv_heads=4,
            head_width=256, tokens=_TOKENS,
            defaults=_DEFAULTS_2, spelled={"hidden_act": "hidden_activation"}, windows=2, divides=True,
            missing={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            built_in=_BUILT_IN, read=_read_capped, write=_write_capped,
            modules=lambda config: _VAULT_MODULES,
        ),
        Dialect(
            model_type="gemma3_text", sizes=_GEMMA3_SIZES, name="Gemma3", base="Gemma3TextModel",
            biases=("attention_bias",), kv_heads=4,
            head_width=256, tokens=_TOKENS,
            defaults=_DEFAULTS_2 | {"vocab_size": 262208, "max_position_embeddings": 131072},
            spelled={"hidden_act": "hidden_activation"}, windows=6, divides=True,
            missing={"rope_theta": 1e6},
            rope=RopeKeys(local=("rope_local_base_freq", 10000.0)),
            built_in=_SANDWICH | {"qk_norm": True},
            # A key of its config that no layer reads.
            refused=_REFUSED | {"attn_logit_softcapping": (None, "transformers' Gemma 3 does not cap scores")},
            read=_read_capped, write=_write_capped,
            modules=lambda config: _SANDWICH_MODULES | QK_NORMS,
        ),
    )
)  # fmt: skip
