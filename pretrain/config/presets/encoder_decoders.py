"""Encoder-decoders: the 2017 Transformer, Marian, T5 and T5 v1.1; sizes as published, and a tiny one of each.

Both stacks are given in full, so that a user may change either.
"""

from typing import Any

_TRANSFORMER_STACK: dict[str, Any] = {
    "activation": "relu",
    "gated": False,
    "norm": "layer",
    "norm_placement": "post",
    "bias": True,
    "position": "sinusoidal",
    "dropout": 0.1,
    "attention_dropout": 0.0,
}
"""Vaswani et al. 2017, 3; dropout by 5.4: on the embeddings and each sub-layer, not on attention weights."""

_MARIAN_STACK: dict[str, Any] = _TRANSFORMER_STACK | {"activation": "silu", "sinusoid": "halves"}
"""Junczys-Dowmunt et al. 2018, as trained for OPUS-MT (Tiedemann and Thottingal 2020)."""

_T5_STACK: dict[str, Any] = {
    "activation": "relu",
    "gated": False,
    "norm": "rms",
    "norm_eps": 1e-6,
    "bias": False,
    "scaled_attention": False,
    "position": "relative",
    "relative_buckets": 32,
    "relative_max_distance": 128,
    "dropout": 0.1,
}
"""Raffel et al. 2020, 2.1 and 3.1.2."""

_T5_V1_1_STACK: dict[str, Any] = _T5_STACK | {"activation": "gelu_tanh", "gated": True, "dropout": 0.0}
"""Shazeer 2020, 2. The release (T5 v1.1) had no dropout in pretraining; fine-tuning wants 0.1 again."""


def _stacks(family: dict[str, Any], layers: int, width: int, heads: int, ff_width: int, **stack: Any) -> dict[str, Any]:
    """Returns an encoder and a decoder of the same size."""
    size = {"layers": layers, "width": width, "heads": heads, "ff_width": ff_width}
    return {"encoder": family | size | stack, "decoder": family | size | stack}


def _transformer(layers: int, width: int, heads: int, ff_width: int, *, dropout: float) -> dict[str, Any]:
    """Returns a Transformer whose one embedding is input, output and head (Vaswani et al. 2017, 3.4)."""
    return _stacks(_TRANSFORMER_STACK, layers, width, heads, ff_width, dropout=dropout) | {
        "max_seq_len": 1024,
        "tied_embeddings": True,
        "scaled_embeddings": True,
        "init": "xavier",
    }


def _marian(layers: int, width: int, heads: int, ff_width: int, *, max_seq_len: int) -> dict[str, Any]:
    """Returns a Marian model: a Transformer with its own sinusoids, activation and a bias of the scores."""
    return _stacks(_MARIAN_STACK, layers, width, heads, ff_width) | {
        "head": {"bias": True},
        "max_seq_len": max_seq_len,
        "tied_embeddings": True,
        "scaled_embeddings": True,
        "init": "xavier",
    }


def _t5(
    layers: int, width: int, heads: int, ff_width: int, *, head_width: int = 64, max_seq_len: int = 512
) -> dict[str, Any]:
    """Returns a T5 v1.0: its embedding, of deviation 1, is the head's too, whose input is divided by sqrt(D)."""
    return _stacks(_T5_STACK, layers, width, heads, ff_width, head_width=head_width) | {
        "head": {"scaled": True},
        "max_seq_len": max_seq_len,
        "tied_embeddings": True,
        "init": "t5",
    }


def _t5_v1_1(
    layers: int, width: int, heads: int, ff_width: int, *, head_width: int = 64, max_seq_len: int = 512
) -> dict[str, Any]:
    """Returns a T5 v1.1: gated, with a head of its own."""
    return _stacks(_T5_V1_1_STACK, layers, width, heads, ff_width, head_width=head_width) | {
        "max_seq_len": max_seq_len,
        "tied_embeddings": False,
        "init": "t5",
    }


ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    # Vaswani et al. 2017, table 3; 0.3 is the dropout of the English-German model.
    "transformer-base": _transformer(6, 512, 8, 2048, dropout=0.1),
    "transformer-big": _transformer(6, 1024, 16, 4096, dropout=0.3),
    # Wu et al. 2021: of their sizes the best for the 29,000 sentences of Multi30k.
    "transformer-tiny": _transformer(4, 128, 4, 256, dropout=0.3),
    "marian-base": _marian(6, 512, 8, 2048, max_seq_len=512),
    "marian-tiny": _marian(2, 64, 4, 256, max_seq_len=128),
    # Raffel et al. 2020, 3.7.
    "t5-small": _t5(6, 512, 8, 2048),
    "t5-base": _t5(12, 768, 12, 3072),
    "t5-large": _t5(24, 1024, 16, 4096),
    "t5-3b": _t5(24, 1024, 32, 16384, head_width=128),
    "t5-11b": _t5(24, 1024, 128, 65536, head_width=128),
    "t5-tiny": _t5(2, 64, 4, 192, head_width=24, max_seq_len=128),
    # Sizes of the v1.1 release: XL and XXL stand for 3B and 11B, with a larger D, a smaller F and fewer heads.
    "t5-v1.1-small": _t5_v1_1(8, 512, 6, 1024),
    "t5-v1.1-base": _t5_v1_1(12, 768, 12, 2048),
    "t5-v1.1-large": _t5_v1_1(24, 1024, 16, 2816),
    "t5-v1.1-xl": _t5_v1_1(24, 2048, 32, 5120),
    "t5-v1.1-xxl": _t5_v1_1(24, 4096, 64, 10240),
    "t5-v1.1-tiny": _t5_v1_1(2, 64, 4, 96, head_width=24, max_seq_len=128),
}
