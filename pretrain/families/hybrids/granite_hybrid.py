"""Granite 4 (Granite team 2025): Mamba-2, some attention without positions, experts beside a dense layer.

Granite 3 with experts has attention with positions alone, and in one of two `model_type`s no dense layer.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from pretrain.config.model import ModelConfig
from pretrain.families.config_json import Fields
from pretrain.families.decoders.granite import GRANITE_KEYS, read_factors, write_factors
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import LLAMA_MODULES, Dialect, decoder_family
from pretrain.families.family import Family, Weight
from pretrain.families.hybrids.bamba import mamba_weights, read_mamba, write_mamba
from pretrain.families.mixer_keys import LINEAR, MixerTensors, read_mixers, write_mixers
from pretrain.families.sizes import Architecture, Size, Values

_GRANITE4 = Architecture(
    ("decoder",),
    LLAMA_STACK | {"position": "none", "residual_scale": 0.22},
    {"max_seq_len": 131072, "tied_embeddings": True, "embedding_scale": 12.0},
)
"""Granite team 2025 (Granite 4.0), as released: no positions, and the constant factors of Granite 3."""
_SIZES = {
    "granite4-h-7b-a1b": _GRANITE4.size(
        40, 1536, 12, 512, of=(100352, 6_939_037_248), kv_heads=4, score_factor=0.0078125,
        mixers=["attention" if number in (5, 15, 25, 35) else "mamba2" for number in range(40)],
        mamba2={"heads": 48, "head_width": 64, "state_width": 128},
        experts={
            "count": 64, "top_k": 6, "shared": 1, "shared_width": 1024, "balance_weight": 0.001,
        },
    ).over(head={"scale": 1 / 6}),
    "granitemoehybrid-tiny": _GRANITE4.size(
        2, 96, 4, 80, max_seq_len=128, kv_heads=2, score_factor=0.125,
        mixers=["mamba2", "attention"],
        mamba2={"heads": 6, "head_width": 32, "state_width": 12, "groups": 2},
        experts={"count": 4, "top_k": 2, "shared": 1, "shared_width": 56, "balance_weight": 0.001},
    ).over(head={"scale": 1 / 8}),
}  # fmt: skip
_GRANITE3 = Architecture(
    ("decoder",),
    LLAMA_STACK | {"kv_heads": 8, "norm_eps": 1e-6, "residual_scale": 0.22},
    {"max_seq_len": 4096, "tied_embeddings": True, "embedding_scale": 12.0},
)
"""Granite team 2024 (Granite 3.0 with experts), as released."""


def _granite3(*size: int, experts: Values, **other: Any) -> Size:
    made = _GRANITE3.size(*size, experts={"balance_weight": 0.001, **experts}, **other)
    return made.over(head={"scale": 1 / 6})


_MOE_SIZES = {
    "granitemoe-1b-a400m": _granite3(
        24, 1024, 16, 512, of=(49155, 1_334_628_352), score_factor=0.015625,
        experts={"count": 32, "top_k": 8},
    ),
    "granitemoe-tiny": _granite3(
        2, 64, 4, 80, max_seq_len=128, kv_heads=2, score_factor=0.125, experts={"count": 4, "top_k": 2}
    ),
}  # fmt: skip
_SHARED_SIZES = {
    "granitemoeshared-tiny": _granite3(
        2, 64, 4, 80, max_seq_len=128, kv_heads=2, score_factor=0.125,
        experts={"count": 4, "top_k": 2, "shared": 1, "shared_width": 56},
    ).over(family="granitemoeshared"),
}  # fmt: skip
_KINDS = {LINEAR: "mamba2", "mamba": "mamba2"}
_INPUTS, _OUTPUTS = (f"block_sparse_moe.{part}_linear" for part in ("input", "output"))


def _read(fields: Fields) -> dict[str, Any]:
    layers = fields.integer("num_hidden_layers", 32)
    key = "layers_block_type" if "layers_block_type" in fields.values else "layer_types"
    values = {
        "mixers": read_mixers(fields, [LINEAR] * layers, _KINDS, key),
        "mamba2": read_mamba(fields, "rms_norm_eps", 1e-6),
        **_read_experts(fields),
        **read_factors(fields),
    }
    if "mamba2" not in values["mixers"]:
        del values["mamba2"]
    if fields.values.get("position_embedding_type") != "rope":
        fields.values |= {"rope_parameters": None, "rope_scaling": None, "rope_theta": 10000.0}
        values["position"] = "none"
    return values


def _read_experts(fields: Fields) -> dict[str, Any]:
    shared = fields.integer("shared_intermediate_size", 1024)
    count = fields.integer("num_local_experts", 8)
    if not count:
        return {"ff_width": shared}
    weight = fields.number("router_aux_loss_coef", 0.001)
    return {
        "experts": {
            "count": count,
            "top_k": fields.integer("num_experts_per_tok", 2),
            "shared": 1,
            "shared_width": shared,
            **({"balance_weight": weight} if weight > 0 else {"balance": "none"}),
        }
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    experts = stack.experts
    values = {
        **({} if experts else {"num_local_experts": 0}),
        "shared_intermediate_size": stack.shared_width or stack.ff_width,
        "layer_types": write_mixers(stack, {LINEAR: "mamba2"}),
        "position_embedding_type": "rope" if stack.is_rotary else None,
        **write_mamba(stack),
        **write_factors(config),
    }
    return values | _write_experts(config)


def _write_experts(config: ModelConfig) -> dict[str, Any]:
    experts = config.last_stack.experts
    if experts is None:
        return {}
    weight = experts.balance_weight if experts.balance == "loss" else 0.0
    values = {"num_local_experts": experts.count, "num_experts_per_tok": experts.top_k}
    return values | {"intermediate_size": config.last_stack.expert_width, "router_aux_loss_coef": weight}


def _modules(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    experts = stack.experts
    dense = "feedforward.shared" if experts else "feedforward"
    modules: dict[str, Any] = {ours: theirs for ours, theirs in LLAMA_MODULES.items() if "feedforward." not in ours}
    if experts is None or experts.shared:
        hidden = stack.shared_width or stack.ff_width
        modules[f"{dense}.gate_up"] = {"shared_mlp.input_linear": 2 * hidden}
        modules[f"{dense}.down"] = {"shared_mlp.output_linear": stack.width}
    if experts:
        of_all = {"gate_up": (_INPUTS, 2 * stack.expert_width), "down": (_OUTPUTS, stack.width)}
        for ours, (theirs, rows) in of_all.items():
            modules[f"feedforward.{ours}"] = {theirs: experts.count * rows}
        modules["feedforward.router"] = {"block_sparse_moe.router.layer": experts.count}
    return modules


def _weights(family: Family, config: ModelConfig) -> list[Weight]:
    """Returns the weights of the table; of experts theirs are [E, outputs, inputs], as ours."""
    experts = config.last_stack.experts
    weights = family.weights(config)
    if experts is None:
        return weights
    width, hidden = config.last_stack.width, config.last_stack.expert_width
    shapes = {
        "feedforward.gate_up.weight": (experts.count, 2 * hidden, width),
        "feedforward.down.weight": (experts.count, width, hidden),
    }
    inner = [weight.ours.split(".", 3)[-1] for weight in weights]
    pairs = zip(weights, inner, strict=True)
    return [replace(one, shape=shapes[name]) if name in shapes else one for one, name in pairs]


def _read_attention(has_shared: bool, fields: Fields) -> dict[str, Any]:
    shared = fields.integer("shared_intermediate_size", 0) if has_shared else 0
    values = _read_experts(fields) | read_factors(fields)
    beside = {"shared": 1, "shared_width": shared} if shared else {"shared": 0, "shared_width": None}
    return values | {"experts": values["experts"] | beside}


def _write_attention(has_shared: bool, config: ModelConfig) -> dict[str, Any]:
    values = write_factors(config) | _write_experts(config)
    return values | ({"shared_intermediate_size": config.last_stack.shared_width} if has_shared else {})


_ALL: dict[str, Any] = {
    "labels": False, "fixed_heads": True, "tokens": {"bos": 1, "eos": 2}, "more": GRANITE_KEYS,
    "modules": _modules,
}  # fmt: skip
_DIALECTS = (
    Dialect(
        model_type="granitemoehybrid", name="GraniteMoeHybrid", sizes=_SIZES,
        biases=("attention_bias",), read=_read, write=_write, mixers={"mamba2": MixerTensors(mamba_weights)}, **_ALL,
    ),
    *(
        Dialect(
            model_type=model_type, name=name, sizes=sizes, read=partial(_read_attention, has_shared),
            write=partial(_write_attention, has_shared),
            refused={"attention_bias": (False, "the attention layers would have biases, and experts none")},
            missing={"num_local_experts": 8}, **_ALL,
        )
        for model_type, name, sizes, has_shared in (
            ("granitemoe", "GraniteMoe", _MOE_SIZES, False),
            ("granitemoeshared", "GraniteMoeShared", _SHARED_SIZES, True),
        )
    ),
)  # fmt: skip
_TABLES = [decoder_family(dialect) for dialect in _DIALECTS]
FAMILIES = tuple(replace(table, weights=partial(_weights, table)) for table in _TABLES)
