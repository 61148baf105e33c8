"""Granite 3 (Granite Team 2024): a LLaMA with constant factors, so that rates transfer."""

from typing import Any

from pretrain.config.model import ModelConfig
from pretrain.families.config_json import Fields, Keys, refusal
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import Dialect, decoder_family
from pretrain.families.sizes import Architecture, Size

_GRANITE = Architecture(
    ("decoder",),
    LLAMA_STACK | {"kv_heads": 8, "residual_scale": 0.22},
    {"max_seq_len": 4096, "tied_embeddings": True, "embedding_scale": 12.0},
)
"""Granite Team 2024 (Granite 3.0), as released: constant factors, so that rates transfer."""


def _size(*size: int, score_factor: float, divisor: float, **other: Any) -> Size:
    made = _GRANITE.size(*size, score_factor=score_factor, **other)
    return made.over(head={"scale": 1 / divisor})


_SIZES = {
    # Granite Team 2024, table 2; factors of the scores and of the logits as released.
    "granite3-2b": _size(
        40, 2048, 32, 8192, of=(49155, 2_533_531_648), score_factor=0.015625, divisor=8.0
    ),
    "granite3-8b": _size(
        40, 4096, 32, 12800, of=(49155, 8_170_848_256), score_factor=0.0078125, divisor=16.0
    ),
    "granite-tiny": _size(
        2, 64, 4, 192, score_factor=0.125, divisor=8.0, kv_heads=2, max_seq_len=128
    ),
}  # fmt: skip


GRANITE_KEYS: Keys = {
    "attention_multiplier": ("score_factor", 1.0),
    "residual_multiplier": ("residual_scale", 1.0),
    "embedding_multiplier": ("model.embedding_scale", 1.0),
}
"""Keys of the constant factors."""


def read_factors(fields: Fields) -> dict[str, Any]:
    """Returns the factor of the scores, whose inverse is a key."""
    divisor = fields.number("logits_scaling", 1.0)
    if divisor <= 0:
        raise refusal("logits_scaling", divisor, "must be more than 0")
    return {"head.scale": 1 / divisor}


def write_factors(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of the factors of logits and of scores."""
    # Rounded: the inverse of an inverse is not always the number itself.
    factor = config.last_stack.score_scale or config.last_stack.per_head_width**-0.5
    divisor = float(f"{1 / config.head.scale:.12g}")
    return {"logits_scaling": divisor, "attention_multiplier": factor}


FAMILIES = (
    decoder_family(
        Dialect(
            model_type="granite", name="Granite", sizes=_SIZES, labels=False,
            biases=("attention_bias", "mlp_bias"), tokens={"bos": 1, "eos": 2},
            read=read_factors, write=write_factors, more=GRANITE_KEYS,
        )
    ),
)  # fmt: skip
