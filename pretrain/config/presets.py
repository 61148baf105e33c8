"""Presets: named shapes of models, plain data over `ModelConfig`.

A preset gives no `vocab_size`: that is the tokenizer's, unless the config says otherwise. A user's keys are laid over
it, down to single keys of a stack: `model: {preset: llama-5m, decoder: {layers: 8}}`.
"""

import difflib
from typing import Any

from pretrain.config.merge import merge
from pretrain.errors import ConfigError

_GPT2_STACK: dict[str, Any] = {
    "activation": "gelu_tanh",
    "gated": False,
    "norm": "layer",
    "bias": True,
    "position": "learned",
}
"""Radford et al. 2019. Dropout, 0.1 in the release, is 0: one pass over a corpus does not overfit."""

_LLAMA_STACK: dict[str, Any] = {
    "activation": "silu",
    "gated": True,
    "norm": "rms",
    "bias": False,
    "position": "rotary",
}
"""Touvron et al. 2023."""

PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-124m": {
        "decoder": _GPT2_STACK | {"layers": 12, "width": 768, "heads": 12, "ff_width": 3072},
        "max_seq_len": 1024,
        "tied_embeddings": True,
    },
    "gpt2-tiny": {
        "decoder": _GPT2_STACK | {"layers": 2, "width": 64, "heads": 4, "ff_width": 256},
        "max_seq_len": 128,
        "tied_embeddings": True,
    },
    # nanoGPT's settings of character-level Shakespeare for a CPU.
    "gpt-shakespeare": {
        "decoder": _GPT2_STACK
        | {"layers": 4, "width": 128, "heads": 4, "ff_width": 512, "activation": "gelu", "bias": False},
        "vocab_multiple": 1,
        "max_seq_len": 64,
        "tied_embeddings": True,
    },
    # Llama 3.2 1B, at the context length of its training before the rotary frequencies were rescaled.
    "llama-1b": {
        "decoder": _LLAMA_STACK
        | {"layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "ff_width": 8192, "rope_theta": 500000.0},
        "max_seq_len": 8192,
        "tied_embeddings": True,
    },
    # 5.05M parameters with a vocabulary of 8192.
    "llama-5m": {
        "decoder": _LLAMA_STACK | {"layers": 4, "width": 256, "heads": 4, "kv_heads": 2, "ff_width": 704},
        "max_seq_len": 1024,
        "tied_embeddings": True,
    },
    "llama-tiny": {
        "decoder": _LLAMA_STACK | {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ff_width": 192},
        "max_seq_len": 128,
        "tied_embeddings": False,
    },
}


def expand_preset(model: dict[str, Any]) -> dict[str, Any]:
    """Lays the keys of a `model:` section over the preset that it names; without one, returns it as it is.

    A nested mapping is merged key by key, any other value replaces the preset's: `decoder: null` removes a stack.
    Values are not checked here; `ModelConfig` does that.

    Raises:
        ConfigError: There is no such preset; names the nearest ones.
    """
    name = model.get("preset")
    if not isinstance(name, str):
        return model
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.4) or sorted(PRESETS)
        raise ConfigError(f"unknown model.preset {name!r}", fix=f"use {' or '.join(near)}")
    return merge(PRESETS[name], model)
