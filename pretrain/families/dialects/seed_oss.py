"""Seed-OSS (ByteDance Seed team 2025): a LLaMA with biases of queries, keys and values, and dropout."""

from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import Dialect, decoder_family
from pretrain.families.sizes import Architecture

_SEED = Architecture(
    ("decoder",),
    LLAMA_STACK | {"kv_heads": 8, "head_width": 128, "qkv_bias": True, "norm_eps": 1e-6, "rope_theta": 1e7},
    {"max_seq_len": 524288, "tied_embeddings": False, "family": "seed_oss"},
)
_SIZES = {
    "seed_oss-36b": _SEED.size(64, 5120, 80, 27648, of=(155136, 36_151_104_512)),
    "seed_oss-tiny": _SEED.size(2, 64, 4, 192, max_seq_len=128, kv_heads=2, head_width=24),
}

FAMILIES = (
    decoder_family(
        Dialect(
            model_type="seed_oss", name="SeedOss", sizes=_SIZES, answers="transformer.", kv_heads=8,
            head_width=128, tokens={"pad": 1, "bos": 0, "eos": 2},
            more={
                "attention_bias": ("qkv_bias", True), "attention_out_bias": ("output_bias", False),
                "mlp_bias": ("bias", False), "residual_dropout": ("dropout", 0.1),
            },
            defaults={
                "vocab_size": 155136, "intermediate_size": 27648, "num_hidden_layers": 64,
                "num_attention_heads": 80, "max_position_embeddings": 524288, "attention_dropout": 0.1,
            },
        )
    ),
)  # fmt: skip
