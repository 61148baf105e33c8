"""Keys and tensors of experts, each of whose matrices is a tensor of theirs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pretrain.config.model import ModelConfig
from pretrain.families.config_json import Fields


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """Keys and tensors of the experts of a `model_type`, with the defaults of transformers."""

    count: tuple[str, ...]  # keys of their number, the newest first; every version reads the last
    defaults: tuple[int, int]  # their number, and how many a token chooses
    module: str  # name of the layer
    gate: str  # names of the three matrices of an expert
    up: str
    down: str
    width: tuple[str, int] | None = None  # key of their hidden width; None: that of dense layers
    normalizes: bool | None = None  # weights of the chosen sum to 1; None: by `norm_topk_prob`
    mixed: bool = False  # keys tell which layers have experts


def _read_experts(keys: ExpertKeys, fields: Fields) -> dict[str, Any]:
    hidden = fields.integer("intermediate_size")  # the width of dense layers, which are none
    count, top_k = keys.defaults
    for key in reversed(keys.count):
        count = fields.integer(key, count)
    width = hidden if keys.width is None else fields.integer(*keys.width)
    weight = fields.number("router_aux_loss_coef", 0.001)
    normalizes = keys.normalizes
    if normalizes is None:
        normalizes = fields.flag("norm_topk_prob", False)
        if keys.mixed:
            fields.only("decoder_sparse_step", 1, "some layers would be dense")
            fields.only("mlp_only_layers", [], "some layers would be dense")
    else:
        fields.only("router_jitter_noise", 0.0, "the router would read its input times noise")
    experts = {
        "count": count,
        "top_k": fields.integer("num_experts_per_tok", top_k),
        "width": None if width == hidden else width,
        "normalize": normalizes,
        **({"balance_weight": weight} if weight > 0 else {"balance": "none"}),
    }
    return {"experts": experts}


def _write_experts(keys: ExpertKeys, config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    experts = stack.experts
    if experts is None:
        return {}
    values: dict[str, Any] = {keys.count[-1]: experts.count, "num_experts_per_tok": experts.top_k}
    values["router_aux_loss_coef"] = experts.balance_weight if experts.balance == "loss" else 0.0
    values[keys.width[0] if keys.width else "intermediate_size"] = stack.expert_width
    if keys.normalizes is None:
        values["norm_topk_prob"] = experts.normalize
    return values | ({"decoder_sparse_step": 1, "mlp_only_layers": []} if keys.mixed else {})


def _with_experts(keys: ExpertKeys, modules: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    if stack.experts is None:
        return dict(modules)
    numbers = [f"{keys.module}.experts.{number}." for number in range(stack.experts.count)]
    halves = [f"{name}{part}" for name in numbers for part in (keys.gate, keys.up)]
    return {
        **modules,
        "feedforward.router": {f"{keys.module}.gate": stack.experts.count},
        "feedforward.gate_up": dict.fromkeys(halves, stack.expert_width),
        "feedforward.down": dict.fromkeys((f"{name}{keys.down}" for name in numbers), stack.width),
    }


def expert_hooks(keys: ExpertKeys, modules: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a `Dialect` with experts."""
    return {
        "read": partial(_read_experts, keys),
        "write": partial(_write_experts, keys),
        "modules": partial(_with_experts, keys, modules),
    }
