"""Marian (Junczys-Dowmunt et al. 2018), as opus-mt: the Transformer of 2017 with a bias of the scores.

Its sinusoids are in two halves, where those of the paper are interleaved: a model of ours is
exported as a Marian where both stacks have `sinusoid: halves` and the head has `bias: true`.
"""

from typing import Any

from pretrain.config.model import ModelConfig
from pretrain.families.sizes import BOTH, Architecture
from pretrain.families.two_stacks.bart import FIXED, pair_family, write_pair
from pretrain.families.unreleased import TRANSFORMER

_MARIAN = Architecture(
    BOTH,
    TRANSFORMER.stack | {"activation": "silu", "sinusoid": "halves"},
    TRANSFORMER.ends | {"head": {"bias": True}, "max_seq_len": 512},
)
"""Junczys-Dowmunt et al. 2018, as trained for OPUS-MT (Tiedemann and Thottingal 2020)."""
_SIZES = {
    "marian-base": _MARIAN.size(6, 512, 8, 2048, of=(80035, 85_196_451)),
    "marian-tiny": _MARIAN.size(2, 64, 4, 256, max_seq_len=128),
}
_FIXED = FIXED | {
    "share_encoder_decoder_embeddings": (True, "our stacks share one table and one vocabulary"),
    "normalize_before": (False, "the released code always has its norms after the residual sums"),
    "normalize_embedding": (False, "the released code has no norm over its embeddings"),
    "add_final_layer_norm": (False, "the released code has no norm after the last layer"),
    "static_position_embeddings": (True, "positions are sinusoids here"),
}


def _write(config: ModelConfig) -> dict[str, Any]:
    return write_pair(config) | {"decoder_vocab_size": config.vocab_size}


# The sinusoids of the paper are interleaved.
_STACK = {"position": "sinusoidal", "sinusoid": "halves", "norm_placement": "post"}
FAMILIES = (
    pair_family(
        "marian", "Marian", _SIZES, _STACK, scorer="MTModel", defaults={"vocab_size": 58101},
        tokens={"pad": 58100, "eos": 0, "start": 58100}, fixed=_FIXED, write=_write,
    ),
)  # fmt: skip
