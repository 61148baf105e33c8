"""Code World Model (FAIR CodeGen team 2025): a LLaMA 3 with windows in three of four layers."""

from typing import Any

from pretrain.config.model import ModelConfig
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import Dialect, decoder_family
from pretrain.families.sizes import Architecture

_CWM = Architecture(
    ("decoder",),
    LLAMA_STACK | {"kv_heads": 8, "window": 8192, "global_every": 4, "rope_theta": 1000000.0},
    {"max_seq_len": 131072, "tied_embeddings": False, "family": "cwm"},
)
_FACTORS = {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SIZES = {
    "cwm-32b": _CWM.size(
        64, 6144, 48, 21504, of=(128256, 32_581_097_472),
        rope_scaling={"kind": "llama3", "original_max_seq_len": 8192, **_FACTORS},
    ),
    "cwm-tiny": _CWM.size(4, 64, 4, 192, max_seq_len=128, kv_heads=2, window=16),
}  # fmt: skip
_ROPE = {"rope_type": "llama3", "rope_theta": 1e6, "original_max_position_embeddings": 8192}


def _write(config: ModelConfig) -> dict[str, Any]:
    stack, begin = config.last_stack, config.special_tokens.bos
    keys: dict[str, Any] = {} if begin is not None else {"bos_token_id": -1}  # not null in theirs
    if stack.rope_scaling is None:  # what theirs takes a null for is a scaling
        keys["rope_parameters"] = {"rope_type": "default", "rope_theta": stack.rope_theta}
    return keys


FAMILIES = (
    decoder_family(
        Dialect(
            model_type="cwm", name="Cwm", sizes=_SIZES, labels=False, biases=("mlp_bias",),
            kv_heads=8, head_width=128, divides=True, tokens={"bos": 128000, "eos": 128001},
            windows=lambda number: number % 4 == 0,
            missing={"sliding_window": 8192, "rope_parameters": _ROPE | _FACTORS, "rope_theta": 1e6},
            write=_write,
            defaults={
                "vocab_size": 128256, "hidden_size": 6144, "intermediate_size": 21504,
                "num_hidden_layers": 64, "num_attention_heads": 48, "rms_norm_eps": 1e-5,
                "max_position_embeddings": 131072,
            },
        )
    ),
)  # fmt: skip
