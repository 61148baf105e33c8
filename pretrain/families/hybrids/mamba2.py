"""Mamba 2 (Dao and Gu 2024): layers of a state space alone, without feed-forward layers and positions."""

from typing import Any

from pretrain.config.model import ModelConfig
from pretrain.families.config_json import Fields, Keys
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import Dialect, Names, decoder_family
from pretrain.families.hybrids.bamba import mamba_weights, read_mamba, write_mamba
from pretrain.families.mixer_keys import MixerTensors
from pretrain.families.sizes import Architecture

_ALONE = {"mixers": ["mamba2"], "position": "none", "heads": 1, "head_width": 64, "ff_width": 0}
"""Heads are of attention, of which there is no layer."""
_MAMBA2 = Architecture(
    ("decoder",),
    LLAMA_STACK | _ALONE | {"norm_eps": 1e-5},
    {"max_seq_len": 1048576, "tied_embeddings": True},
)
"""Dao and Gu 2024 (Mamba-2), as released; a state has no longest row."""
_SIZES = {
    "mamba2-130m": _MAMBA2.size(24, 768, 1, 0, of=(50288, 128_989_632)),
    "mamba2-2.7b": _MAMBA2.size(64, 2560, 1, 0, of=(50288, 2_702_599_680)),
    "mamba2-tiny": _MAMBA2.size(
        2, 48, 1, 0, max_seq_len=128, tied_embeddings=False,
        mamba2={"heads": 6, "head_width": 16, "state_width": 5, "groups": 2, "kernel": 3},
    ),
}  # fmt: skip
_SIZE_KEYS: Keys = {
    "num_heads": ("heads", 128),
    "state_size": ("state_width", 128),
    "n_groups": ("groups", 8),
    "conv_kernel": ("kernel", 4),
    "use_bias": ("bias", False),
    "use_conv_bias": ("filter_bias", True),
}
_INNER = ("expand", "head_dim")


def _read(fields: Fields) -> dict[str, Any]:
    sizes = read_mamba(fields, "layer_norm_epsilon", 1e-5, _SIZE_KEYS, _INNER)
    # Elsewhere the width of a head of attention.
    fields.values.pop("head_dim", None)
    return {**_ALONE, "mamba2": sizes}


def _write(config: ModelConfig) -> dict[str, Any]:
    return write_mamba(config.last_stack, _SIZE_KEYS, _INNER)


FAMILIES = (
    decoder_family(
        Dialect(
            model_type="mamba2", name="Mamba2", sizes=_SIZES, labels=False,
            names=Names("backbone.", "backbone.embeddings.weight", "backbone.layers.{}.", "norm_f"),
            spelled={
                "num_attention_heads": None, "num_key_value_heads": None, "intermediate_size": None,
                "attention_dropout": None, "rms_norm_eps": "layer_norm_epsilon",
            },
            defaults={
                "vocab_size": 32768, "num_hidden_layers": 64, "rms_norm_eps": 1e-5,
                "initializer_range": 0.1, "max_position_embeddings": 1048576,
            },
            tokens={"pad": 1, "bos": 0, "eos": 2},
            built_in=_ALONE, refused={"hidden_act": ("silu", "gates and values of ours have SiLU")},
            read=_read, write=_write, modules=lambda config: {"attention_norm": ("norm",)},
            mixers={"mamba2": MixerTensors(lambda stack: mamba_weights(stack, "mixer"))},
            renames=((r"backbone\.embedding\.", "backbone.embeddings."),),
        )
    ),
)  # fmt: skip
