"""Command R, Aya 23 (Aryabumi et al. 2024), Command A (Team Cohere 2025): one norm for both sub-layers.

Neighbouring dimensions of a head are rotated, which here are a half apart.
"""

from typing import Any

from pretrain.config.model import ModelConfig
from pretrain.families.config_json import Fields
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import QK_NORMS, Dialect, decoder_family, one_norm_modules
from pretrain.families.rotary_keys import FULL, halves_order, periodic_types
from pretrain.families.sizes import Architecture

_COHERE = Architecture(
    ("decoder",),
    LLAMA_STACK | {"norm": "layer", "parallel": "one_norm"},
    {"max_seq_len": 8192, "tied_embeddings": True, "head": {"scale": 0.0625}},
)
"""Command R and Aya 23 (Aryabumi et al. 2024, 3.1), as released."""
_COHERE_PLUS = Architecture(
    ("decoder",),
    _COHERE.stack | {"qk_norm": "heads", "rope_theta": 75000000.0},
    _COHERE.ends | {"head": {"scale": 5 / 6}},
)
"""Command R+, as released."""
_COHERE2 = Architecture(
    ("decoder",),
    _COHERE.stack
    | {"window": 4096, "global_every": 4, "global_first": 3, "rope_theta": 50000.0}
    | {"unrotated_layers": [*range(3, 64, 4)]},
    _COHERE.ends | {"head": {"scale": 0.25}},
)
"""Team Cohere 2025 (Command A), 2.1: layers without a window have no positions."""
_COHERE_SIZES = {
    "cohere-aya-8b": _COHERE.size(32, 4096, 32, 14336, of=(256000, 8_028_033_024), kv_heads=8),
    "cohere-r-35b": _COHERE.size(
        40, 8192, 64, 22528, of=(256000, 34_980_831_232), rope_theta=8000000.0, max_seq_len=131072
    ),
    "cohere-r-plus": _COHERE_PLUS.size(
        64, 12288, 96, 33792, of=(256000, 103_810_674_688), kv_heads=8, max_seq_len=131072
    ),
    "cohere-tiny": _COHERE.size(2, 64, 4, 192, max_seq_len=128, kv_heads=2),
}
_COHERE2_SIZES = {
    "cohere2-r7b": _COHERE2.size(32, 4096, 32, 14336, of=(256000, 8_028_033_024), kv_heads=8),
    "cohere2-tiny": _COHERE2.size(4, 64, 4, 192, max_seq_len=128, kv_heads=2, window=16),
}
_DEFAULTS = {
    "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
    "num_attention_heads": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}  # fmt: skip
_TOKENS = {"pad": 0, "bos": 5, "eos": 255001}
_BUILT_IN = {"norm": "layer", "norm_bias": False, "parallel": "one_norm"}
_SCALED = {"logit_scale": ("head.scale", 0.0625)}


def _cohere_modules(config: ModelConfig) -> dict[str, Any]:
    return one_norm_modules(config) | (QK_NORMS if config.last_stack.qk_norm else {})


def _read_cohere2(fields: Fields) -> dict[str, Any]:
    usual = periodic_types(fields, fields.integer("num_hidden_layers", 40), 4)
    listed = fields.values.get("layer_types") or usual
    kinds = listed if isinstance(listed, list) else []  # refused where windows are read
    return {"unrotated_layers": [number for number, kind in enumerate(kinds) if kind == FULL]}


FAMILIES = tuple(
    decoder_family(dialect)
    for dialect in (
        Dialect(
            model_type="cohere", sizes=_COHERE_SIZES, labels=False, name="Cohere",
            biases=("attention_bias",), tokens=_TOKENS, spelled={"rms_norm_eps": "layer_norm_eps"},
            defaults=_DEFAULTS, more=_SCALED, built_in=_BUILT_IN, missing={"rope_theta": 500000.0},
            modules=_cohere_modules, order=halves_order, joined_norms=True,
            read=lambda fields: {"qk_norm": fields.flag("use_qk_norm", False) and "heads"},
            write=lambda config: {"use_qk_norm": bool(config.last_stack.qk_norm)},
        ),
        Dialect(
            model_type="cohere2", sizes=_COHERE2_SIZES, labels=False, name="Cohere2",
            biases=("attention_bias",), tokens=_TOKENS, spelled={"rms_norm_eps": "layer_norm_eps"},
            defaults=_DEFAULTS, more=_SCALED, built_in=_BUILT_IN, windows=4, fixed_heads=True,
            modules=one_norm_modules, order=halves_order, read=_read_cohere2,
        ),
    )
)  # fmt: skip
