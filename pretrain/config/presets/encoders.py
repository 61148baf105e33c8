"""Encoder-only models: BERT and ModernBERT; sizes as published, and a tiny one of each."""

from typing import Any

_BERT_STACK: dict[str, Any] = {
    "activation": "gelu",
    "gated": False,
    "norm": "layer",
    "norm_eps": 1e-12,
    "norm_placement": "post",
    "input_norm": True,
    "bias": True,
    "position": "learned",
    "token_types": 2,
    "dropout": 0.1,
}
"""Devlin et al. 2019, 3 and appendix A.2; eps as released."""

_MODERNBERT_STACK: dict[str, Any] = {
    "activation": "gelu",
    "gated": True,
    "norm": "layer",
    "norm_eps": 1e-5,
    "input_norm": True,
    "bias": False,
    "position": "rotary",
    "rope_theta": 160000.0,
    "rope_local_theta": 10000.0,
    "global_every": 3,
}
"""Warner et al. 2024, 2.1; thetas as released, after the extension to 8192 tokens."""


def _bert(layers: int, width: int, heads: int, ff_width: int) -> dict[str, Any]:
    """Returns a BERT with the head of its masked-language-model objective; initialised as released."""
    return {
        "encoder": _BERT_STACK | {"layers": layers, "width": width, "heads": heads, "ff_width": ff_width},
        "head": {"transform": True, "bias": True},
        "max_seq_len": 512,
        "tied_embeddings": True,
        "init_scaled": False,
    }


def _modernbert(
    layers: int, width: int, heads: int, ff_width: int, *, window: int = 65, max_seq_len: int = 8192
) -> dict[str, Any]:
    """Returns a ModernBERT. Its local attention of 128 tokens, 64 on each side, is a window of 65."""
    size = {"layers": layers, "width": width, "heads": heads, "ff_width": ff_width, "window": window}
    return {
        "encoder": _MODERNBERT_STACK | size,
        "head": {"transform": True, "bias": True},
        "max_seq_len": max_seq_len,
        "tied_embeddings": True,
    }


ENCODERS: dict[str, dict[str, Any]] = {
    "bert-base": _bert(12, 768, 12, 3072),
    "bert-large": _bert(24, 1024, 16, 4096),
    # Turc et al. 2019, table 1.
    "bert-tiny": _bert(2, 128, 2, 512),
    # Warner et al. 2024, 2.1.3.
    "modernbert-base": _modernbert(22, 768, 12, 1152),
    "modernbert-large": _modernbert(28, 1024, 16, 2624),
    "modernbert-tiny": _modernbert(4, 64, 4, 96, window=9, max_seq_len=128),
}
