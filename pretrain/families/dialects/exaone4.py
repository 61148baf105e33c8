"""EXAONE 4.0 (LG AI Research 2025): norms of outputs and of heads; layers without a window are not rotated."""

from typing import Any

from pretrain.config.model import ModelConfig
from pretrain.families.config_json import Fields
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.decoders.olmo import OUTPUT_NORMS
from pretrain.families.dialect import Dialect, decoder_family
from pretrain.families.rotary_keys import FULL, periodic_types
from pretrain.families.sizes import Architecture

_NORMS = {"qk_norm": True, "norm_placement": "output"}
_EXAONE = Architecture(
    ("decoder",),
    LLAMA_STACK | _NORMS | {"kv_heads": 8, "rope_theta": 1000000.0},
    {"max_seq_len": 131072, "tied_embeddings": False},
)
_HYBRID = _EXAONE._replace(
    stack=_EXAONE.stack
    | {"window": 4096, "global_every": 4, "global_first": 3}
    | {"unrotated_layers": [*range(3, 64, 4)]}
)
"""LG AI Research 2025, 2.1: of the larger one, every fourth layer sees all without positions."""
_SCALING = {"kind": "llama3", "factor": 16.0, "original_max_seq_len": 8192}
_SCALING |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SIZES = {
    "exaone4-1.2b": _EXAONE.size(
        30, 2048, 32, 4096, of=(102400, 1_279_391_488), tied_embeddings=True, max_seq_len=65536,
        rope_scaling=_SCALING | {"factor": 32.0},
    ),
    "exaone4-32b": _HYBRID.size(
        64, 5120, 40, 27392, of=(102400, 32_003_216_384), rope_scaling=_SCALING
    ),
    "exaone4-tiny": _HYBRID.size(4, 64, 4, 192, max_seq_len=128, kv_heads=2, window=16),
}  # fmt: skip


def _read(fields: Fields) -> dict[str, Any]:
    listed = fields.values.get("layer_types")
    if isinstance(listed, list):  # without an effect then; a word as released
        fields.values.pop("sliding_window_pattern", None)
    if fields.values.get("sliding_window", 4096) is None:
        return {}
    kinds = listed or periodic_types(fields, fields.integer("num_hidden_layers", 32), 4)
    names = kinds if isinstance(kinds, list) else []  # refused where windows are read
    return {"unrotated_layers": [number for number, kind in enumerate(names) if kind == FULL]}


def _write(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    return {"sliding_window": stack.window or (4096 if stack.unrotated_layers else None)}


FAMILIES = (
    decoder_family(
        Dialect(
            model_type="exaone4", name="Exaone4", sizes=_SIZES, answers="transformer.", kv_heads=32,
            tokens={"bos": 0, "eos": 2}, windows=4, built_in=_NORMS, modules=lambda config: OUTPUT_NORMS,
            read=_read, write=_write,
            defaults={"vocab_size": 102400, "intermediate_size": 16384, "rms_norm_eps": 1e-5},
        )
    ),
)  # fmt: skip
