"""Keys and tensors of experts, each of whose matrices is a tensor of theirs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pretrain.config.model import ModelConfig, StackConfig
from pretrain.families.config_json import Fields, Keys, refusal, write_keys
from pretrain.families.family import Weight

_LAYERS, _KINDS = "mlp_layer_types", ("dense", "sparse")


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
    more: Keys = field(default_factory=dict)  # further keys, of the section `experts`
    built_in: Mapping[str, Any] = field(default_factory=dict)  # values of it that no key changes
    shared: str = ""  # name of the layer of shared experts
    shared_width: tuple[str, int] | None = None  # key of its width, where it has a gate
    listed: bool = False  # `mlp_layer_types` tells which layers are dense, the first of them
    bias: str = ""  # tensor of the biases by which sigmoids are chosen; empty: a softmax

    def read(self, fields: Fields) -> dict[str, Any]:
        """Returns the section of experts, as `Dialect.read`."""
        hidden = fields.integer("intermediate_size")  # the width of dense layers, which may be none
        count, top_k = self.defaults
        for key in reversed(self.count):
            count = fields.integer(key, count)
        width = hidden if self.width is None else fields.integer(*self.width)
        if self.mixed:
            fields.only("decoder_sparse_step", 1, "some layers would be dense")
            fields.only("mlp_only_layers", [], "some layers would be dense")
        if self.normalizes is not None:
            fields.only("router_jitter_noise", 0.0, "the router would read its input times noise")
        experts = {
            "count": count,
            "top_k": fields.integer("num_experts_per_tok", top_k),
            "width": None if width == hidden else width,
            "normalize": fields.flag("norm_topk_prob", False) if self.normalizes is None else self.normalizes,
            **_read_balance(self, fields),
            **fields.read(self.more),
            **self.built_in,
        }
        if self.listed and fields.values.get(_LAYERS) is not None:
            experts["first"] = _read_dense(fields)
        if self.shared_width:
            shared = fields.integer(*self.shared_width)
            experts |= {"shared": 1, "shared_gate": True}
            experts |= {} if shared == width else {"shared_width": shared}
        return {"experts": experts}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Returns the keys of the experts, as `Dialect.write`."""
        stack = config.last_stack
        experts = stack.experts
        if experts is None:
            return {}
        values: dict[str, Any] = {self.count[-1]: experts.count}
        values["num_experts_per_tok"] = experts.top_k
        values[self.width[0] if self.width else "intermediate_size"] = stack.expert_width
        if not self.bias:
            values["router_aux_loss_coef"] = experts.balance_weight if experts.balance == "loss" else 0.0
        if self.normalizes is None:
            values["norm_topk_prob"] = experts.normalize
        if self.shared_width:
            values |= {self.shared_width[0]: stack.shared_width, "intermediate_size": stack.ff_width}
        values |= write_keys(experts, self.more)
        if self.listed:
            values[_LAYERS] = [_KINDS[stack.has_experts(number)] for number in range(stack.layers)]
        return values | ({"decoder_sparse_step": 1, "mlp_only_layers": []} if self.mixed else {})

    def modules(self, others: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
        """Returns the modules of a layer, as `Dialect.modules`; `others`: beside its experts."""
        stack = config.last_stack
        experts = stack.experts
        if experts is None:
            return dict(others)
        numbers = [f"{self.module}.experts.{number}." for number in range(experts.count)]
        halves = [f"{name}{part}" for name in numbers for part in (self.gate, self.up)]
        modules = {
            **others,
            "feedforward.router": {f"{self.module}.gate": experts.count},
            "feedforward.gate_up": dict.fromkeys(halves, stack.expert_width),
            "feedforward.down": dict.fromkeys((f"{name}{self.down}" for name in numbers), stack.width),
        }
        return modules | (self._shared(stack) if self.shared and experts.shared else {})

    def _shared(self, stack: StackConfig) -> dict[str, Any]:
        shared = f"{self.module}.{self.shared}"
        halves = [f"{shared}.{self.gate}", f"{shared}.{self.up}"]
        has_gate = stack.experts is not None and stack.experts.shared_gate
        return {
            "feedforward.shared.gate_up": dict.fromkeys(halves, stack.shared_width),
            "feedforward.shared.down": {f"{shared}.{self.down}": stack.width},
            **({"feedforward.shared_gate": {f"{shared}_gate": 1}} if has_gate else {}),
        }

    def further(self, stack: StackConfig) -> list[Weight]:
        """Returns the biases of the choice, as `Dialect.further`."""
        if stack.experts is None or stack.experts.balance != "bias":
            return []
        theirs = f"{self.module}.{self.bias}", stack.experts.count
        return [Weight("feedforward.router.balance.bias", (theirs,))]


def _read_dense(fields: Fields) -> int:
    layers, kinds = fields.integer("num_hidden_layers"), fields.values[_LAYERS]
    dense = kinds.count(_KINDS[0]) if isinstance(kinds, list) else 0
    if kinds != [_KINDS[number >= dense] for number in range(layers)]:
        raise refusal(_LAYERS, kinds, f"{layers} layers can be dense at the beginning alone")
    return dense


def _read_balance(keys: ExpertKeys, fields: Fields) -> dict[str, Any]:
    if keys.bias:
        return {"scores": "sigmoid", "balance": "bias"}
    weight = fields.number("router_aux_loss_coef", 0.001)
    return {"balance_weight": weight} if weight > 0 else {"balance": "none"}


def expert_hooks(keys: ExpertKeys, modules: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a `Dialect` with experts."""
    return {
        "read": keys.read,
        "write": keys.write,
        "modules": partial(keys.modules, modules),
        "further": keys.further,
    }
