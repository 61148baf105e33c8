"""Helium 1 (Kyutai 2025): a LLaMA that rotates neighbouring dimensions, here a half apart."""

from typing import Any

from pretrain.families.config_json import Fields, refusal
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import Dialect, decoder_family
from pretrain.families.rotary_keys import halves_order
from pretrain.families.sizes import Architecture

_HELIUM = Architecture(
    ("decoder",),
    LLAMA_STACK | {"norm_eps": 1e-8, "rope_theta": 20000.0},
    {"max_seq_len": 4096, "tied_embeddings": False, "family": "helium"},
)
_SIZES = {
    "helium1-2b": _HELIUM.size(28, 2048, 16, 8192, of=(64000, 2_023_868_416), kv_heads=8),
    "helium-tiny": _HELIUM.size(2, 64, 4, 192, max_seq_len=128, kv_heads=2),
}


def _read(fields: Fields) -> dict[str, Any]:
    width, heads = fields.integer("head_dim", 128), fields.integer("num_attention_heads", 20)
    if width * heads != (hidden := fields.integer("hidden_size", 2560)):
        raise refusal("head_dim", width, f"must be hidden_size={hidden} by num_attention_heads={heads}")
    return {"output_bias": False}


FAMILIES = (
    decoder_family(
        Dialect(
            model_type="helium", name="Helium", sizes=_SIZES, kv_heads=20, head_width=128,
            tokens={"pad": 3, "bos": 1, "eos": 2}, order=halves_order, read=_read,
            more={"attention_bias": ("qkv_bias", False), "mlp_bias": ("bias", False)},
            missing={"rope_theta": 100000.0},
            defaults={
                "vocab_size": 48000, "hidden_size": 2560, "intermediate_size": 7040,
                "num_hidden_layers": 24, "num_attention_heads": 20, "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-8,
            },
        )
    ),
)  # fmt: skip
