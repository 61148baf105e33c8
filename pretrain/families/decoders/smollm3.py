"""SmolLM 3 (Bakouch et al. 2025): a LLaMA, every fourth layer of which has no rotary positions."""

from typing import Any

from pretrain.config.model import ModelConfig
from pretrain.families.config_json import Fields, refusal
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import Dialect, decoder_family
from pretrain.families.rotary_keys import FULL, SLIDING, read_layer_types, write_layer_types
from pretrain.families.sizes import Architecture

_SMOLLM3 = Architecture(
    ("decoder",),
    LLAMA_STACK | {"norm_eps": 1e-6, "kv_heads": 4, "rope_theta": 5000000.0} | {"unrotated_layers": [*range(3, 36, 4)]},
    {"max_seq_len": 65536, "tied_embeddings": True},
)
"""Bakouch et al. 2025 (SmolLM 3), as released: every fourth layer without rotary positions."""
_SIZES = {
    "smollm3-3b": _SMOLLM3.size(36, 2048, 16, 11008, of=(128256, 3_075_098_624)),
    "smollm3-tiny": _SMOLLM3.size(4, 64, 4, 192, max_seq_len=128, kv_heads=2),
}


def _read(fields: Fields) -> dict[str, Any]:
    layers = fields.integer("num_hidden_layers", 36)
    rotated = fields.values.get("no_rope_layers")
    if rotated is None:
        every = fields.integer("no_rope_layer_interval", 4)
        if every < 1:
            raise refusal("no_rope_layer_interval", every, "must be 1 or more")
        rotated = [int((number + 1) % every != 0) for number in range(layers)]
    is_list = isinstance(rotated, list) and all(one in (0, 1) for one in rotated)
    if not is_list or len(rotated) < layers:
        raise refusal("no_rope_layers", rotated, f"must be 0 or 1 for each of {layers} layers")
    window = fields.optional_integer("sliding_window")
    slides = fields.flag("use_sliding_window", False) and window is not None
    usual = [SLIDING if slides and not rotated[number] else FULL for number in range(layers)]
    keys = read_layer_types(fields, layers, window, usual)
    return keys | {"unrotated_layers": [number for number in range(layers) if not rotated[number]]}


def _write(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    slides = any(window is not None for window in stack.windows)
    numbers = range(stack.layers)
    return {
        "no_rope_layers": [int(number not in stack.unrotated_layers) for number in numbers],
        "use_sliding_window": slides,
        "sliding_window": stack.window if slides else None,
        **write_layer_types(stack),
    }


FAMILIES = (
    decoder_family(
        Dialect(
            model_type="smollm3", name="SmolLM3", sizes=_SIZES, answers="transformer.",
            biases=("attention_bias", "mlp_bias"), kv_heads=4, missing={"rope_theta": 2000000.0},
            defaults={
                "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36,
                "num_attention_heads": 16, "max_position_embeddings": 32768,
                "tie_word_embeddings": True,
            },
            tokens={"pad": 128004, "bos": 128000, "eos": 128001}, read=_read, write=_write,
        )
    ),
)  # fmt: skip
