"""StarCoder 2 (Lozhkov et al. 2024): a GPT-2 with rotary positions, grouped queries and windows."""

from pretrain.families.decoders.gpt2 import GPT2_STACK
from pretrain.families.decoders.gpt_neox import LAYER_NORM
from pretrain.families.dialect import GATE_UP, LLAMA_MODULES, Dialect, decoder_family
from pretrain.families.sizes import Architecture

_STARCODER2 = Architecture(
    ("decoder",),
    GPT2_STACK | {"position": "rotary", "window": 4096},
    {"max_seq_len": 16384, "tied_embeddings": True},
)
"""Lozhkov et al. 2024, as released, with 16,384 positions; dropout, 0.1 in the release, is 0, as in GPT-2's."""
_SIZES = {
    # Periods of the rotary embeddings as released.
    "starcoder2-3b": _STARCODER2.size(
        30, 3072, 24, 12288, of=(49152, 3_030_371_328), kv_heads=2, rope_theta=999999.4420358813
    ),
    "starcoder2-7b": _STARCODER2.size(
        32, 4608, 36, 18432, of=(49152, 7_173_923_840), kv_heads=4, rope_theta=1000000.0
    ),
    "starcoder2-tiny": _STARCODER2.size(2, 64, 4, 256, max_seq_len=128, kv_heads=2, window=16),
}  # fmt: skip
_MODULES = {
    **{ours: theirs for ours, theirs in LLAMA_MODULES.items() if theirs != GATE_UP},
    "feedforward.up": ("mlp.c_fc",),
    "feedforward.down": ("mlp.c_proj",),
}

FAMILIES = (
    decoder_family(
        Dialect(
            model_type="starcoder2", sizes=_SIZES, name="Starcoder2", kv_heads=2, windows="all",
            tokens={"bos": 50256, "eos": 50256},
            spelled={"rms_norm_eps": "norm_epsilon"}, missing={"sliding_window": None},
            defaults={
                "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288,
                "num_hidden_layers": 30,
                "num_attention_heads": 24, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
                "tie_word_embeddings": True, "initializer_range": 0.018042,
            },
            more={"residual_dropout": ("dropout", 0.0), "use_bias": ("bias", True)},
            built_in=LAYER_NORM | {"activation": "gelu_tanh", "gated": False},
            modules=lambda config: _MODULES,
            write=lambda config: {"embedding_dropout": config.last_stack.dropout},
        )
    ),
)  # fmt: skip
