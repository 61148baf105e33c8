"""ERNIE 4.5 (ERNIE team 2025), dense: a LLaMA that rotates neighbouring dimensions, here a half apart."""

from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import Dialect, decoder_family
from pretrain.families.rotary_keys import halves_order
from pretrain.families.sizes import Architecture

_ERNIE = Architecture(
    ("decoder",),
    LLAMA_STACK | {"kv_heads": 2, "head_width": 128, "rope_theta": 500000.0},
    {"max_seq_len": 131072, "tied_embeddings": True, "family": "ernie4_5"},
)
_SIZES = {
    "ernie4_5-0.3b": _ERNIE.size(18, 1024, 16, 3072, of=(103424, 360_748_032)),
    "ernie4_5-tiny": _ERNIE.size(2, 64, 4, 192, max_seq_len=128, head_width=24),
}

FAMILIES = (
    decoder_family(
        Dialect(
            model_type="ernie4_5", name="Ernie4_5", sizes=_SIZES, labels=False, kv_heads=2, head_width=128,
            tokens={"pad": 0, "bos": 1, "eos": 2}, order=halves_order, spelled={"attention_dropout": None},
            more={"use_bias": ("bias", False)}, missing={"rope_theta": 500000.0},
            defaults={
                "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072,
                "num_hidden_layers": 18, "num_attention_heads": 16, "rms_norm_eps": 1e-5,
                "max_position_embeddings": 131072, "tie_word_embeddings": True,
            },
        )
    ),
)  # fmt: skip
