"""LLaMA 1 to 3 (Touvron et al. 2023, Llama Team 2024): RMSNorm, rotary positions, a gated feed-forward layer."""

from typing import Any

from pretrain.families.dialect import Dialect, decoder_family
from pretrain.families.sizes import Architecture, Size

LLAMA_STACK = {
    "activation": "silu",
    "gated": True,
    "norm": "rms",
    "bias": False,
    "position": "rotary",
}
LLAMA = Architecture(("decoder",), LLAMA_STACK, {"max_seq_len": 4096, "tied_embeddings": False})
"""Touvron et al. 2023, 2.2."""
_LLAMA3 = LLAMA._replace(stack=LLAMA_STACK | {"kv_heads": 8, "rope_theta": 500000.0})
"""Llama Team 2024, 3.2, table 3."""


def _long(*size: int, tied: bool, factor: float, **other: Any) -> Size:
    """Returns a Llama 3.1 or 3.2, whose rotary frequencies were rescaled to 131,072 tokens."""
    scaling = {"kind": "llama3", "factor": factor, "original_max_seq_len": 8192}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    other |= {"max_seq_len": 131072, "tied_embeddings": tied, "rope_scaling": scaling}
    return _LLAMA3.size(*size, **other)


_SIZES = {
    # Touvron et al. 2023 (Llama 2), 2.2: grouped queries in the largest only.
    "llama2-7b": LLAMA.size(32, 4096, 32, 11008, of=(32000, 6_738_415_616)),
    "llama2-13b": LLAMA.size(40, 5120, 40, 13824, of=(32000, 13_015_864_320)),
    "llama2-70b": LLAMA.size(80, 8192, 64, 28672, of=(32000, 68_976_648_192), kv_heads=8),
    "llama3-8b": _LLAMA3.size(32, 4096, 32, 14336, of=(128256, 8_030_261_248), max_seq_len=8192),
    "llama3-70b": _LLAMA3.size(80, 8192, 64, 28672, of=(128256, 70_553_706_496), max_seq_len=8192),
    "llama3.1-8b": _long(32, 4096, 32, 14336, of=(128256, 8_030_261_248), tied=False, factor=8.0),
    "llama3.1-70b": _long(80, 8192, 64, 28672, of=(128256, 70_553_706_496), tied=False, factor=8.0),
    "llama3.2-1b": _long(16, 2048, 32, 8192, of=(128256, 1_235_814_400), tied=True, factor=32.0),
    # Llama 3.2 1B, at the context of its training before the rotary frequencies were rescaled.
    "llama-1b": _LLAMA3.size(
        16, 2048, 32, 8192, of=(128256, 1_235_814_400), max_seq_len=8192, tied_embeddings=True
    ),
    # Of this project; 5.05M parameters.
    "llama-5m": LLAMA.size(
        4, 256, 4, 704, of=(8192, 5_048_576), max_seq_len=1024, tied_embeddings=True, kv_heads=2
    ),
    "llama-tiny": LLAMA.size(2, 64, 4, 192, max_seq_len=128, kv_heads=2),
}  # fmt: skip

FAMILIES = (
    decoder_family(
        Dialect(
            model_type="llama", name="Llama", sizes=_SIZES, answers="transformer.", divides=True,
            tokens={"bos": 1, "eos": 2}, biases=("attention_bias", "mlp_bias"),
        )
    ),
)  # fmt: skip
