"""gpt-oss: experts in every layer, attention sinks, windows in every other layer, biases throughout.

The matrices of all experts of a layer are one tensor of theirs, transposed, with gate and up in
alternating columns. The released weights are quantized and have to be dequantized first.
"""

from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.families.config_json import Fields, Keys, build_config, write_keys, write_tokens
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import QKV
from pretrain.families.family import Family, Weight, affine, own_head, table
from pretrain.families.label_names import with_heads
from pretrain.families.rotary_keys import (
    FULL,
    OF_ONE_LENGTH,
    SLIDING,
    qkv_rows,
    read_heads,
    read_layer_types,
    read_rope,
    write_layer_types,
    write_rope,
)
from pretrain.families.sizes import Architecture

_SCALING = {"kind": "yarn", "factor": 32.0, "original_max_seq_len": 4096, "truncate": False}
_GPT_OSS = Architecture(
    ("decoder",),
    LLAMA_STACK
    | {"activation": "quick_gelu", "gate_limit": 7.0, "gate_shift": 1.0, "bias": True, "attention_sinks": True}
    | {"kv_heads": 8, "head_width": 64, "window": 128, "global_every": 2, "global_first": 1}
    | {"rope_theta": 150000.0, "rope_scaling": _SCALING},
    {"max_seq_len": 131072, "tied_embeddings": False},
)
"""OpenAI 2025 (gpt-oss), 2.2, and as released: windows in every other layer, from the first."""
_SIZES = {
    # OpenAI 2025, table 1: 20.9B and 116.8B parameters.
    "gpt_oss-20b": _GPT_OSS.size(
        24, 2880, 64, 2880, of=(201088, 20_914_757_184), experts={"count": 32, "top_k": 4}
    ),
    "gpt_oss-120b": _GPT_OSS.size(
        36, 2880, 64, 2880, of=(201088, 116_829_156_672), experts={"count": 128, "top_k": 4}
    ),
    "gpt_oss-tiny": _GPT_OSS.size(
        2, 64, 4, 48, max_seq_len=128, kv_heads=2, head_width=24, window=16,
        experts={"count": 4, "top_k": 2},
    ),
}  # fmt: skip
_WORDS = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_STACK: Keys = {
    "num_hidden_layers": ("layers", 36),
    "hidden_size": ("width", 2880),
    "num_attention_heads": ("heads", 64),
    "intermediate_size": ("ff_width", 2880),
    "rms_norm_eps": ("norm_eps", 1e-5),
    "attention_dropout": ("attention_dropout", 0.0),
    "swiglu_limit": ("gate_limit", 7.0),
}
_MODEL: Keys = {
    "vocab_size": ("vocab_size", 201088),
    "max_position_embeddings": ("max_seq_len", 131072),
    "tie_word_embeddings": ("tied_embeddings", False),
    "initializer_range": ("init_std", 0.02),
}
_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_ROPE |= {"original_max_position_embeddings": 4096}
_BUILT_IN = {"activation": "quick_gelu", "gate_shift": 1.0, "bias": True, "attention_sinks": True}
"""Values that no key of theirs changes."""


def _read_config(values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
    fields = Fields({"rope_theta": 150000.0} | values)
    if not fields.section("rope_scaling") and not fields.section("rope_parameters"):
        fields.values["rope_scaling"] = _ROPE
    model, stack = fields.read(_MODEL), fields.read(_STACK)
    layers = stack["layers"]
    fields.only("attention_bias", True, "experts have biases, and attention layers would have none")
    fields.only("swiglu_alpha", 1.702, "the gate would be another multiple of a sigmoid")
    weight = fields.number("router_aux_loss_coef", 0.001)
    stack |= _BUILT_IN
    stack |= read_heads(fields, stack, fields.optional_integer("num_key_value_heads", 8), 64)
    stack |= read_rope(fields, model["max_seq_len"], OF_ONE_LENGTH)
    alternating = [FULL if number % 2 else SLIDING for number in range(layers)]
    stack |= read_layer_types(fields, layers, fields.optional_integer("sliding_window", 128), alternating)
    stack["experts"] = {
        "count": fields.integer("num_local_experts", fields.integer("num_experts", 128)),
        "top_k": fields.integer("num_experts_per_tok", 4),
        **({"balance_weight": weight} if weight > 0 else {"balance": "none"}),
    }
    has_head = model["tied_embeddings"] or _HEAD in names or fields.claims("GptOssForCausalLM")
    return build_config(
        **model,
        decoder=stack,
        head=HeadConfig(kind="lm" if has_head else "none"),
        special_tokens=fields.special_tokens(),
    )


def _write_config(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    experts = stack.experts
    values = {
        **write_keys(config, _MODEL),
        **write_keys(stack, _STACK),
        **write_tokens(config.special_tokens),
        "intermediate_size": stack.expert_width,
        "num_key_value_heads": stack.num_kv_heads,
        "head_dim": stack.per_head_width,
        "hidden_act": "silu",  # as in the releases; what it is has no key
        "attention_bias": True,
        "sliding_window": stack.window,
        **write_layer_types(stack),
        **write_rope(stack),
    }
    if stack.rope_scaling is None:  # transformers 5 reads a null as YaRN, 4 reads that key alone
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": stack.rope_theta}
    if experts is None:
        return values
    weight = experts.balance_weight if experts.balance == "loss" else 0.0
    sizes = {"num_local_experts": experts.count, "num_experts_per_tok": experts.top_k}
    return values | sizes | {"router_aux_loss_coef": weight}


def _weights(config: ModelConfig) -> list[Weight]:
    stack = config.last_stack
    width = stack.width
    norms = {
        "attention_norm": {"input_layernorm": width},
        "feedforward_norm": {"post_attention_layernorm": width},
    }
    experts = stack.experts.count if stack.experts else 1
    linears = {
        "attention.qkv": dict(zip(QKV, qkv_rows(stack), strict=True)),
        "attention.output": {"self_attn.o_proj": width},
        "feedforward.router": {"mlp.router": experts},
    }
    weights = [table("embedding.weight", _WORDS, config.vocab_size)]
    for number in range(stack.layers):
        ours, theirs = f"decoder.blocks.{number}.", f"model.layers.{number}."
        weights += affine(ours, theirs, norms, bias=False)
        weights += affine(ours, theirs, linears, bias=True)
        weights.append(Weight(f"{ours}attention.sinks", ((f"{theirs}self_attn.sinks", stack.heads),)))
        for name, rows in (("gate_up", 2 * stack.expert_width), ("down", width)):
            for kind, ending in (("weight", ""), ("bias", "_bias")):
                one = f"{theirs}mlp.experts.{name}_proj{ending}", experts * rows
                is_mixed = name == "gate_up"
                fused = Weight(f"{ours}feedforward.{name}.{kind}", (one,), fused=experts, interleaved=is_mixed)
                weights.append(fused)
    weights += affine("decoder.", "model.", {"norm": {"norm": width}}, bias=False)
    return weights + own_head(config, _HEAD)


def _architecture(config: ModelConfig) -> str:
    return "GptOssForCausalLM" if config.head.record.scores_words else "GptOssModel"


_FAMILY = Family(
    model_type="gpt_oss",
    read_config=_read_config,
    write_config=_write_config,
    architecture=_architecture,
    weights=_weights,
    aliases={_HEAD: _WORDS},
    prefix="model.",
    sizes=_SIZES,
)
FAMILIES = (with_heads(_FAMILY, None),)
