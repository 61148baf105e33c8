"""Decoder-only models: GPT-2, LLaMA, Mistral, Qwen; sizes as published, and a tiny one of each.

Where a paper and the released configuration differ, the released one is here. Contexts are those of training, not what
a method of inference stretches them to.
"""

from typing import Any


def _decoder(
    family: dict[str, Any],
    layers: int,
    width: int,
    heads: int,
    ff_width: int,
    *,
    max_seq_len: int,
    tied: bool,
    **stack: Any,
) -> dict[str, Any]:
    """Returns a model of one causal stack: the family's values, this size, and whatever else the size changes."""
    size = {"layers": layers, "width": width, "heads": heads, "ff_width": ff_width}
    return {"decoder": family | size | stack, "max_seq_len": max_seq_len, "tied_embeddings": tied}


_GPT2: dict[str, Any] = {
    "activation": "gelu_tanh",
    "gated": False,
    "norm": "layer",
    "bias": True,
    "position": "learned",
}
"""Radford et al. 2019, 2.3. Dropout, 0.1 in the release, is 0: one pass over a corpus does not overfit."""

_LLAMA: dict[str, Any] = {"activation": "silu", "gated": True, "norm": "rms", "bias": False, "position": "rotary"}
"""Touvron et al. 2023, 2.2."""

_LLAMA3: dict[str, Any] = _LLAMA | {"kv_heads": 8, "rope_theta": 500000.0}
"""Llama Team 2024, 3.2, table 3."""

_QWEN2: dict[str, Any] = _LLAMA | {"qkv_bias": True, "norm_eps": 1e-6, "rope_theta": 1000000.0}
"""Yang et al. 2024 (Qwen2), 2.2, table 1; Qwen2.5 has the same shapes."""

_QWEN3: dict[str, Any] = _LLAMA | {"qk_norm": True, "norm_eps": 1e-6, "rope_theta": 1000000.0}
"""Yang et al. 2025 (Qwen3), 2: the bias of queries, keys and values gave way to a norm of each head."""


def _llama3_scaling(factor: float) -> dict[str, Any]:
    """The rescaled frequencies of Llama 3.1 (factor 8) and 3.2 (32), which read 131,072 tokens."""
    scaling = {"kind": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return scaling | {"original_max_seq_len": 8192}


# Radford et al. 2019, table 2; named by what is really in the released checkpoints.
_GPT2_SIZES: dict[str, dict[str, Any]] = {
    "gpt2-124m": _decoder(_GPT2, 12, 768, 12, 3072, max_seq_len=1024, tied=True),
    "gpt2-350m": _decoder(_GPT2, 24, 1024, 16, 4096, max_seq_len=1024, tied=True),
    "gpt2-774m": _decoder(_GPT2, 36, 1280, 20, 5120, max_seq_len=1024, tied=True),
    "gpt2-1.5b": _decoder(_GPT2, 48, 1600, 25, 6400, max_seq_len=1024, tied=True),
    "gpt2-tiny": _decoder(_GPT2, 2, 64, 4, 256, max_seq_len=128, tied=True),
    # nanoGPT's settings of character-level Shakespeare for a CPU.
    "gpt-shakespeare": _decoder(_GPT2, 4, 128, 4, 512, max_seq_len=64, tied=True, activation="gelu", bias=False)
    | {"vocab_multiple": 1},
}

_LLAMA_SIZES: dict[str, dict[str, Any]] = {
    # Touvron et al. 2023 (Llama 2), 2.2: context 4096; grouped queries in the largest only.
    "llama2-7b": _decoder(_LLAMA, 32, 4096, 32, 11008, max_seq_len=4096, tied=False),
    "llama2-13b": _decoder(_LLAMA, 40, 5120, 40, 13824, max_seq_len=4096, tied=False),
    "llama2-70b": _decoder(_LLAMA, 80, 8192, 64, 28672, max_seq_len=4096, tied=False, kv_heads=8),
    "llama3-8b": _decoder(_LLAMA3, 32, 4096, 32, 14336, max_seq_len=8192, tied=False),
    "llama3-70b": _decoder(_LLAMA3, 80, 8192, 64, 28672, max_seq_len=8192, tied=False),
    "llama3.1-8b": _decoder(
        _LLAMA3, 32, 4096, 32, 14336, max_seq_len=131072, tied=False, rope_scaling=_llama3_scaling(8.0)
    ),
    "llama3.1-70b": _decoder(
        _LLAMA3, 80, 8192, 64, 28672, max_seq_len=131072, tied=False, rope_scaling=_llama3_scaling(8.0)
    ),
    "llama3.2-1b": _decoder(
        _LLAMA3, 16, 2048, 32, 8192, max_seq_len=131072, tied=True, rope_scaling=_llama3_scaling(32.0)
    ),
    # Llama 3.2 1B, at the context length of its training before the rotary frequencies were rescaled.
    "llama-1b": _decoder(_LLAMA3, 16, 2048, 32, 8192, max_seq_len=8192, tied=True),
    # 5.05M parameters with a vocabulary of 8192.
    "llama-5m": _decoder(_LLAMA, 4, 256, 4, 704, max_seq_len=1024, tied=True, kv_heads=2),
    "llama-tiny": _decoder(_LLAMA, 2, 64, 4, 192, max_seq_len=128, tied=False, kv_heads=2),
}

_MISTRAL_SIZES: dict[str, dict[str, Any]] = {
    # Jiang et al. 2023, table 1. Released with positions to 32,768, of which a layer sees the last 4096.
    "mistral-7b": _decoder(_LLAMA, 32, 4096, 32, 14336, max_seq_len=32768, tied=False, kv_heads=8, window=4096),
    "mistral-tiny": _decoder(_LLAMA, 2, 64, 4, 192, max_seq_len=128, tied=False, kv_heads=2, window=16),
}

_QWEN_SIZES: dict[str, dict[str, Any]] = {
    "qwen2-0.5b": _decoder(_QWEN2, 24, 896, 14, 4864, max_seq_len=32768, tied=True, kv_heads=2),
    "qwen2-1.5b": _decoder(_QWEN2, 28, 1536, 12, 8960, max_seq_len=32768, tied=True, kv_heads=2),
    "qwen2-7b": _decoder(_QWEN2, 28, 3584, 28, 18944, max_seq_len=32768, tied=False, kv_heads=4),
    # The release of this size has another eps than the smaller ones.
    "qwen2-72b": _decoder(_QWEN2, 80, 8192, 64, 29568, max_seq_len=32768, tied=False, kv_heads=8, norm_eps=1e-5),
    "qwen2-tiny": _decoder(_QWEN2, 2, 64, 4, 192, max_seq_len=128, tied=True, kv_heads=2),
    # Yang et al. 2025, table 1; heads are 128 wide whatever the model's width.
    "qwen3-0.6b": _decoder(_QWEN3, 28, 1024, 16, 3072, max_seq_len=32768, tied=True, kv_heads=8, head_width=128),
    "qwen3-1.7b": _decoder(_QWEN3, 28, 2048, 16, 6144, max_seq_len=32768, tied=True, kv_heads=8, head_width=128),
    "qwen3-4b": _decoder(_QWEN3, 36, 2560, 32, 9728, max_seq_len=32768, tied=True, kv_heads=8, head_width=128),
    "qwen3-8b": _decoder(_QWEN3, 36, 4096, 32, 12288, max_seq_len=32768, tied=False, kv_heads=8, head_width=128),
    "qwen3-14b": _decoder(_QWEN3, 40, 5120, 40, 17408, max_seq_len=32768, tied=False, kv_heads=8, head_width=128),
    "qwen3-32b": _decoder(_QWEN3, 64, 5120, 64, 25600, max_seq_len=32768, tied=False, kv_heads=8, head_width=128),
    "qwen3-tiny": _decoder(_QWEN3, 2, 64, 4, 192, max_seq_len=128, tied=True, kv_heads=2, head_width=24),
}

DECODERS: dict[str, dict[str, Any]] = _GPT2_SIZES | _LLAMA_SIZES | _MISTRAL_SIZES | _QWEN_SIZES
