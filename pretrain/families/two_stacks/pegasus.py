"""PEGASUS (Zhang et al. 2020) and BlenderBot (Roller et al. 2021): norms before sub-layers, none over embeddings.

Positions of PEGASUS are sinusoids in two halves, those of BlenderBot are learned.
"""

from pretrain.families.sizes import BOTH, Architecture
from pretrain.families.two_stacks.bart import pair_family
from pretrain.families.unreleased import TRANSFORMER

_PEGASUS = Architecture(
    BOTH,
    TRANSFORMER.stack | {"sinusoid": "halves", "norm_placement": "pre"},
    {
        "head": {"bias": True}, "max_seq_len": 1024, "tied_embeddings": True, "init_scaled": False,
        "scaled_embeddings": True,
    },
)  # fmt: skip
"""Zhang et al. 2020, 6.1, as released."""
_BLENDERBOT = Architecture(
    BOTH,
    _PEGASUS.stack | {"activation": "gelu", "position": "learned"},
    _PEGASUS.ends | {"max_seq_len": 128},
)
"""Roller et al. 2021, 4.2: a short encoder and a long decoder."""
_PEGASUS_SIZES = {
    "pegasus-large": _PEGASUS.size(16, 1024, 16, 4096, of=(96103, 568_796_007)),
    "pegasus-tiny": _PEGASUS.size(2, 64, 4, 256, max_seq_len=128),
}
_LARGEST = _BLENDERBOT.size(2, 2560, 32, 10240, of=(8008, 2_696_276_808))
_BLENDERBOT_SIZES = {
    # Roller et al. 2021, 4.2.
    "blenderbot-3b": _LARGEST.over(decoder={**_LARGEST.values["decoder"], "layers": 24}),
    "blenderbot-tiny": _BLENDERBOT.size(2, 64, 4, 256),
}
_BOTH_SINUSOIDAL = {"position": "sinusoidal", "sinusoid": "halves", "norm_placement": "pre"}
FAMILIES = (
    pair_family(
        "pegasus", "Pegasus", _PEGASUS_SIZES, _BOTH_SINUSOIDAL,
        tokens={"pad": 0, "eos": 1, "start": 0},
    ),
    pair_family(
        "blenderbot", "Blenderbot", _BLENDERBOT_SIZES, {"position": "learned", "norm_placement": "pre"},
        tokens={"pad": 0, "bos": 1, "eos": 2, "start": 1},
        defaults={
            "vocab_size": 8008, "max_position_embeddings": 128, "d_model": 2560, "encoder_layers": 2,
            "decoder_layers": 24, **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 10240),
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 32),
        },
    ),
)  # fmt: skip
