"""Granite 3 (Granite Team 2024) and HyperCLOVA X (NAVER Cloud 2025): a LLaMA with constant factors.

With them rates transfer. HyperCLOVA X has norms of the outputs of sub-layers too.
"""

from typing import Any

from pretrain.config.model import ModelConfig
from pretrain.families.config_json import Fields, Keys, refusal
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import LLAMA_MODULES, Dialect, decoder_family
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
_CLOVA = Architecture(
    ("decoder",),
    LLAMA_STACK | {"kv_heads": 8, "norm_placement": "sandwich", "rope_theta": 1e8},
    {"max_seq_len": 131072, "tied_embeddings": False, "embedding_scale": 10.0},
)
_CLOVA_SIZES = {
    # NAVER Cloud 2025 (HyperCLOVA X SEED Think), as released.
    "hyperclovax-14b": _CLOVA.size(
        38, 6144, 48, 14336, of=(110592, 14_748_112_896), score_factor=0.0078125
    ).over(head={"scale": 0.125}),
    "hyperclovax-tiny": _CLOVA.size(
        2, 64, 4, 192, score_factor=0.125, residual_scale=0.5, kv_heads=2, max_seq_len=128
    ).over(head={"scale": 0.125}),
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


_PEAKS = {
    "attention_output_norm": ("post_norm1",),
    "feedforward_output_norm": ("post_norm2",),
}


def _read_clova(fields: Fields) -> dict[str, Any]:
    placement = "sandwich" if fields.flag("use_post_norm", True) else "pre"
    width = fields.optional_integer("head_dim")
    width = width or fields.integer("hidden_size", 4096) // fields.integer("num_attention_heads", 32)
    factor = None
    if fields.values.get("attention_multiplier") is not None:
        factor = fields.number("attention_multiplier")
    usual = max(width, 1) ** -0.5
    return {"norm_placement": placement, "score_factor": None if factor == usual else factor}


def _write_clova(config: ModelConfig) -> dict[str, Any]:
    values = write_factors(config)
    return {
        "attention_multiplier": values["attention_multiplier"],
        "use_post_norm": config.last_stack.norm_placement == "sandwich",
    }


def _clova_modules(config: ModelConfig) -> dict[str, Any]:
    is_sandwich = config.last_stack.norm_placement == "sandwich"
    return {**LLAMA_MODULES, **(_PEAKS if is_sandwich else {})}


_ALL: dict[str, Any] = {
    "labels": False,
    "biases": ("attention_bias", "mlp_bias"),
    "tokens": {"bos": 1, "eos": 2},
}
_SCALED = {key: ours for key, ours in GRANITE_KEYS.items() if key != "attention_multiplier"}
FAMILIES = tuple(
    decoder_family(dialect)
    for dialect in (
        Dialect(
            model_type="granite", name="Granite", sizes=_SIZES, read=read_factors,
            write=write_factors, more=GRANITE_KEYS, **_ALL,
        ),
        Dialect(
            model_type="hyperclovax", name="HyperCLOVAX", sizes=_CLOVA_SIZES, divides=True,
            read=_read_clova, write=_write_clova, modules=_clova_modules,
            more={**_SCALED, "logits_scaling": ("head.scale", 1.0)}, **_ALL,
        ),
    )
)  # fmt: skip
