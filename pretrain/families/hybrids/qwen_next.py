"""Qwen3-Next (Qwen team 2025): three layers of the gated delta rule to one of gated attention, and experts."""

from functools import partial
from typing import Any

from pretrain.config.model import ModelConfig, StackConfig
from pretrain.families.config_json import Fields, Keys, refusal
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import LLAMA_MODULES, QK_NORMS, Dialect, decoder_family
from pretrain.families.expert_keys import ExpertKeys
from pretrain.families.family import Weight
from pretrain.families.mixer_keys import (
    LINEAR,
    MixerTensors,
    filter_weight,
    read_mixers,
    write_mixers,
)
from pretrain.families.rotary_keys import FULL, RopeKeys
from pretrain.families.sizes import Architecture, Values

_NORMS = {"qk_norm": True, "norm_offset": True, "attention_gate": True}
_QWEN3_NEXT = Architecture(
    ("decoder",),
    LLAMA_STACK
    | _NORMS
    | {"mixers": ["delta", "delta", "delta", "attention"], "norm_eps": 1e-6}
    | {"rope_theta": 10000000.0, "rope_fraction": 0.25},
    {"max_seq_len": 32768, "tied_embeddings": False},
)
"""Qwen team 2025 (Qwen3-Next), as released."""


def _experts(count: int, top_k: int, width: int) -> Values:
    values = {"count": count, "top_k": top_k, "width": width, "balance_weight": 0.001}
    return values | {"shared": 1, "shared_gate": True}


def _delta(heads: int, value_heads: int, key_width: int, value_width: int) -> Values:
    values = {"heads": heads, "value_heads": value_heads}
    values |= {"key_width": key_width, "value_width": value_width}
    return values | {"negative_eigenvalues": False, "norm_eps": 1e-6}


_SIZES = {
    "qwen3_next-80b-a3b": _QWEN3_NEXT.size(
        48, 2048, 16, 5120, of=(151936, 79_674_391_296), kv_heads=2, head_width=256,
        experts=_experts(512, 10, 512), delta=_delta(16, 32, 128, 128),
    ),
    "qwen3_next-tiny": _QWEN3_NEXT.size(
        4, 64, 4, 192, max_seq_len=128, kv_heads=2, head_width=24, experts=_experts(8, 2, 48),
        delta=_delta(2, 4, 6, 10),
    ),
}  # fmt: skip
_EXPERTS = ExpertKeys(
    ("num_local_experts", "num_experts"), (512, 10), "mlp", "gate_proj", "up_proj", "down_proj",
    width=("moe_intermediate_size", 512), mixed=True, more={"norm_topk_prob": ("normalize", True)},
    shared="shared_expert", shared_width=("shared_expert_intermediate_size", 512),
)  # fmt: skip
_MODULES = {**LLAMA_MODULES, **QK_NORMS}
_KINDS = {LINEAR: "delta"}
_SIZE_KEYS: Keys = {
    "linear_num_key_heads": ("heads", 16),
    "linear_num_value_heads": ("value_heads", 32),
    "linear_key_head_dim": ("key_width", 128),
    "linear_value_head_dim": ("value_width", 128),
    "linear_conv_kernel_dim": ("kernel", 4),
}


def _read(fields: Fields) -> dict[str, Any]:
    values = _EXPERTS.read(fields)
    layers = fields.integer("num_hidden_layers", 48)
    every = fields.integer("full_attention_interval", 4)
    if every < 1:
        raise refusal("full_attention_interval", every, "must be 1 or more")
    usual = [LINEAR if (number + 1) % every else FULL for number in range(layers)]
    delta = fields.read(_SIZE_KEYS) | {"negative_eigenvalues": False}
    delta["norm_eps"] = fields.number("rms_norm_eps", 1e-6)
    return values | {"mixers": read_mixers(fields, usual, _KINDS), "delta": delta}


def _write(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    sizes = stack.delta.sizes(stack.width, stack.heads)
    return _EXPERTS.write(config) | {
        **{key: getattr(sizes, ours) for key, (ours, _) in _SIZE_KEYS.items()},
        "layer_types": write_mixers(stack, _KINDS),
    }


def _order(stack: StackConfig) -> tuple[int, ...]:
    """Returns rows of queries, keys, values and gates among theirs: of a head its query, then its gate."""
    width, heads, kv_heads = stack.per_head_width, stack.heads, stack.num_kv_heads
    places = [2 * head for head in range(heads)]
    places += range(2 * heads, 2 * (heads + kv_heads))
    places += [2 * head + 1 for head in range(heads)]
    return tuple(width * place + row for place in places for row in range(width))


def _of_groups(sizes: list[int], groups: int) -> tuple[int, ...]:
    """Returns rows of parts, each of all groups, among theirs: the parts of a group one after another."""
    length = sum(sizes)
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return tuple(
        group * length + start + row
        for start, size in zip(starts, sizes, strict=True)
        for group in range(groups)
        for row in range(size)
    )


def _delta_weights(stack: StackConfig) -> list[Weight]:
    sizes = stack.delta.sizes(stack.width, stack.heads)
    heads, each = sizes.value_heads, sizes.value_heads // sizes.heads
    values = each * sizes.value_width
    parts = [sizes.key_width, sizes.key_width, values, values]
    # Theirs writes the strengths of a group before its decays.
    rates = _of_groups([each, each], sizes.heads)
    rows = {
        "attention.qkv_gate.weight": ("in_proj_qkvz.weight", sum(sizes.fused), _of_groups(parts, sizes.heads)),
        "attention.rates.weight": ("in_proj_ba.weight", 2 * heads, rates[heads:] + rates[:heads]),
        "attention.a_log": ("A_log", heads, ()),
        "attention.dt_bias": ("dt_bias", heads, ()),
        "attention.norm.weight": ("norm.weight", sizes.value_width, ()),
        "attention.output.weight": ("out_proj.weight", stack.width, ()),
    }
    weights = [
        Weight(ours, ((f"linear_attn.{theirs}", count),), order=order) for ours, (theirs, count, order) in rows.items()
    ]
    return [*weights, filter_weight("linear_attn.conv1d", sum(sizes.rows), sizes.kernel)]


FAMILIES = (
    decoder_family(
        Dialect(
            model_type="qwen3_next", name="Qwen3Next", sizes=_SIZES, answers="transformer.",
            kv_heads=2, head_width=256, rope=RopeKeys(share=0.25),
            defaults={
                "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
                "num_attention_heads": 16,
                "max_position_embeddings": 32768,
            },
            built_in=_NORMS,
            refused={"attention_bias": (False, "the attention layers would have biases, and experts none")},
            read=_read, write=_write, modules=partial(_EXPERTS.modules, _MODULES), order=_order,
            mixers={"delta": MixerTensors(_delta_weights)},
            missing={"intermediate_size": 5632}, ignored=(r"mtp\..*",),
        )
    ),
)  # fmt: skip
