"""DeepSeek-V3: latent attention, and experts chosen by groups and biases after some dense layers.

Their heads have the rotated dimensions last, in pairs of neighbours; ours have them first, in two
halves. Scores depend on neither order, so rows of the projections are exchanged in ours. The
released weights are in FP8 and have to be converted first.

Modules that predict further tokens (2.2) are their layers behind the last one, with copies of
embedding and head. transformers neither reads nor saves them, so they are known by their names.
"""

import math
from dataclasses import replace
from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig, StackConfig
from pretrain.config.model.stack import predictor_number
from pretrain.families.config_json import (
    THEIR_ACTIVATIONS,
    Fields,
    Keys,
    build_config,
    refusal,
    write_keys,
    write_tokens,
)
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.family import Family, Weight, affine, own_head, table
from pretrain.families.label_names import with_heads
from pretrain.families.rotary_keys import OF_ONE_LENGTH, read_rope, write_rope
from pretrain.families.sizes import Architecture, Values

_DEEPSEEK_V3 = Architecture(
    ("decoder",),
    LLAMA_STACK | {"norm_eps": 1e-6, "head_width": 192},
    {"max_seq_len": 163840, "tied_embeddings": False},
)
"""DeepSeek-AI 2024 (DeepSeek-V3), 2.1 and 4.2, and as released, after the extension of its context."""


def _chosen_by_bias(count: int, top_k: int, width: int, **other: int) -> Values:
    kinds = {"scores": "sigmoid", "balance": "bias", "scale": 2.5}
    return {"count": count, "top_k": top_k, "width": width, **kinds, **other}


_SIZES = {
    # DeepSeek-AI 2024, 4.2: 671B parameters, 37B of which meet a token; without its module of further tokens.
    "deepseek_v3-671b": _DEEPSEEK_V3.size(
        61, 7168, 128, 18432, of=(129280, 671_026_404_352),
        latent={"query_rank": 1536, "kv_rank": 512, "rope_width": 64, "value_width": 128},
        experts=_chosen_by_bias(256, 8, 2048, shared=1, first=3, groups=8, top_groups=4),
        rope_scaling={
            "kind": "yarn", "factor": 40.0, "original_max_seq_len": 4096, "attention_factor": 1.0,
            "score_mscale": 1.0,
        },
    ),
    "deepseek_v3-tiny": _DEEPSEEK_V3.size(
        2, 64, 4, 192, max_seq_len=128, head_width=24,
        latent={"query_rank": 32, "kv_rank": 24, "rope_width": 8, "value_width": 16},
        experts=_chosen_by_bias(8, 2, 48, shared=1, first=1, groups=4, top_groups=2),
    ),
}  # fmt: skip
_WORDS = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_JOIN = "eh_proj"
_STACK: Keys = {
    "num_hidden_layers": ("layers", 61),
    "hidden_size": ("width", 7168),
    "num_attention_heads": ("heads", 128),
    "intermediate_size": ("ff_width", 18432),
    "rms_norm_eps": ("norm_eps", 1e-6),
    "attention_dropout": ("attention_dropout", 0.0),
}
_MODEL: Keys = {
    "vocab_size": ("vocab_size", 129280),
    "max_position_embeddings": ("max_seq_len", 4096),
    "tie_word_embeddings": ("tied_embeddings", False),
    "initializer_range": ("init_std", 0.02),
}
_EXPERTS = {
    "n_routed_experts": ("count", 256),
    "num_experts_per_tok": ("top_k", 8),
    "moe_intermediate_size": ("width", 2048),
    "n_shared_experts": ("shared", 1),
    "first_k_dense_replace": ("first", 3),
    "n_group": ("groups", 8),
    "topk_group": ("top_groups", 4),
}
_LATENT = {
    "kv_lora_rank": ("kv_rank", 512),
    "qk_rope_head_dim": ("rope_width", 64),
    "v_head_dim": ("value_width", 128),
}


def _read_rope(fields: Fields, max_seq_len: int) -> dict[str, Any]:
    key = "rope_scaling" if fields.section("rope_scaling") else "rope_parameters"
    rope = Fields(dict(fields.section(key)))
    scales = {name: rope.values.pop(name, None) for name in ("mscale", "mscale_all_dim")}
    keys = read_rope(Fields(fields.values | {key: rope.values}), max_seq_len, OF_ONE_LENGTH)
    scaling = keys["rope_scaling"]
    if scaling is None or scaling["kind"] == "default":
        return keys
    if scaling["kind"] != "yarn":
        if scales["mscale_all_dim"]:
            raise refusal("mscale_all_dim", scales["mscale_all_dim"], "can be represented with rope_type=yarn only")
        return keys
    numbers = Fields({name: value or 0.0 for name, value in scales.items()})
    mscale, of_scores = numbers.number("mscale"), numbers.number("mscale_all_dim")
    if of_scores:
        scaling["score_mscale"] = of_scores
    if mscale and of_scores and "attention_factor" not in scaling:
        grown = 0.1 * math.log(max(1.0, scaling["factor"]))
        scaling["attention_factor"] = (mscale * grown + 1.0) / (of_scores * grown + 1.0)
    return keys


def _read_config(values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
    fields = Fields(values)
    model, stack = fields.read(_MODEL), fields.read(_STACK)
    fields.only("attention_bias", False, "projections to latent vectors would have biases")
    fields.only("rope_interleave", True, "rotated dimensions would be in two halves")
    fields.only("rms_norm_eps", 1e-6, "norms of latent vectors have this one, and ours have one for all")
    kv_heads = fields.optional_integer("num_key_value_heads", stack["heads"])
    if kv_heads not in (None, stack["heads"]):
        raise refusal("num_key_value_heads", kv_heads, f"only num_attention_heads={stack['heads']} has a meaning")
    experts = fields.read(_EXPERTS)
    if experts["shared"] < 1:
        raise refusal("n_shared_experts", experts["shared"], "transformers has 1 or more")
    latent = fields.read(_LATENT) | {"query_rank": fields.optional_integer("q_lora_rank", 1536)}
    width = fields.integer("qk_nope_head_dim", 128) + latent["rope_width"]
    stack |= {
        "head_width": None if width * stack["heads"] == stack["width"] else width,
        "activation": fields.activation("hidden_act", "silu"),
        "latent": latent,
        "experts": experts
        | {"width": None if experts["width"] == stack["ff_width"] else experts["width"]}
        | {"scores": "sigmoid", "balance": "bias", "normalize": fields.flag("norm_topk_prob", True)}
        | {"scale": fields.number("routed_scaling_factor", 2.5)},
        **_read_rope(fields, model["max_seq_len"]),
    }
    further = f"model.layers.{{}}.{_JOIN}.weight"
    multi_token = 0
    while further.format(stack["layers"] + multi_token) in names:
        multi_token += 1
    has_head = model["tied_embeddings"] or _HEAD in names or fields.claims("DeepseekV3ForCausalLM")
    return build_config(
        **model,
        decoder=stack,
        multi_token=multi_token,
        head=HeadConfig(kind="lm" if has_head else "none"),
        special_tokens=fields.special_tokens(bos=0, eos=1),
    )


def _write_config(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    experts, latent = stack.experts, stack.latent
    values = {
        **write_keys(config, _MODEL),
        **write_keys(stack, _STACK),
        **write_tokens(config.special_tokens),
        "num_key_value_heads": stack.num_kv_heads,
        "hidden_act": THEIR_ACTIVATIONS[stack.activation],
        "attention_bias": stack.bias,
        "rope_interleave": True,
        "num_nextn_predict_layers": config.multi_token,
        **write_rope(stack),
    }
    if stack.rope_scaling is not None and stack.rope_scaling.score_mscale:
        values["rope_scaling"] |= {"mscale_all_dim": stack.rope_scaling.score_mscale}
    if latent is not None:
        values |= {key: getattr(latent, ours) for key, (ours, _) in _LATENT.items()}
        values |= {"q_lora_rank": latent.query_rank, "qk_nope_head_dim": stack.per_head_width - latent.rope_width}
    if experts is not None:
        values |= {key: getattr(experts, ours) for key, (ours, _) in _EXPERTS.items()}
        values |= {"moe_intermediate_size": stack.expert_width, "norm_topk_prob": experts.normalize}
        values |= {"routed_scaling_factor": experts.scale}
    return values


def _attention(stack: StackConfig, ours: str, theirs: str) -> list[Weight]:
    latent = stack.latent
    if latent is None:
        return []
    head_width, half = stack.per_head_width - latent.rope_width, latent.rope_width // 2
    halves = [2 * number + odd for odd in (0, 1) for number in range(half)]
    # Of each head of queries the rotated part first; of the latent vectors it stays last.
    of_heads = (*(head_width + number for number in halves), *range(head_width))
    of_down = (*range(latent.kv_rank), *(latent.kv_rank + number for number in halves))
    query_rows = stack.heads * stack.per_head_width
    up = "q_proj" if latent.query_rank is None else "q_b_proj"
    parts: dict[str, tuple[str, int, tuple[int, ...]]] = {
        "query_up": (up, query_rows, of_heads),
        "kv_down": ("kv_a_proj_with_mqa", latent.kv_rank + latent.rope_width, of_down),
        "kv_norm": ("kv_a_layernorm", latent.kv_rank, ()),
        "kv_up": ("kv_b_proj", stack.heads * (head_width + latent.value_width), ()),
        "output": ("o_proj", stack.width, ()),
    }
    if latent.query_rank is not None:
        parts |= {"query_down": ("q_a_proj", latent.query_rank, ())}
        parts |= {"query_norm": ("q_a_layernorm", latent.query_rank, ())}
    return [
        Weight(f"{ours}attention.{name}.weight", ((f"{theirs}self_attn.{part}.weight", rows),), order=order)
        for name, (part, rows, order) in parts.items()
    ]


def _gated(ours: str, theirs: list[str], hidden: int, width: int) -> list[Weight]:
    halves = [f"{name}{part}_proj" for name in theirs for part in ("gate", "up")]
    downs = [f"{name}down_proj" for name in theirs]
    linears = {"gate_up": dict.fromkeys(halves, hidden), "down": dict.fromkeys(downs, width)}
    return affine(ours, "", linears, bias=False)


def _block(stack: StackConfig, ours: str, theirs: str, number: int) -> list[Weight]:
    norms = {
        "attention_norm": {"input_layernorm": stack.width},
        "feedforward_norm": {"post_attention_layernorm": stack.width},
    }
    weights = [*affine(ours, theirs, norms, bias=False), *_attention(stack, ours, theirs)]
    layer, mlp = f"{ours}feedforward.", f"{theirs}mlp."
    experts = stack.experts
    if experts is None or not stack.has_experts(number):
        return weights + _gated(layer, [mlp], stack.ff_width, stack.width)
    weights.append(Weight(f"{layer}router.weight", ((f"{mlp}gate.weight", experts.count),)))
    if experts.balance == "bias":
        bias = f"{mlp}gate.e_score_correction_bias", experts.count
        weights.append(Weight(f"{layer}router.balance.bias", (bias,)))
    each = [f"{mlp}experts.{expert}." for expert in range(experts.count)]
    weights += _gated(layer, each, stack.expert_width, stack.width)
    if experts.shared:
        shared = f"{mlp}shared_experts."
        weights += _gated(f"{layer}shared.", [shared], stack.shared_width, stack.width)
    return weights


def _predictor(stack: StackConfig, number: int) -> list[Weight]:
    """Returns the weights of a module that predicts a further token, without those that it shares."""
    ours, theirs = f"multi_token.inputs.{number}.", f"model.layers.{stack.layers + number}."
    norms = {"embedding_norm": {"enorm": stack.width}, "hidden_norm": {"hnorm": stack.width}}
    weights = affine(ours, theirs, norms | {"projection": {_JOIN: stack.width}}, bias=False)
    weights += _block(stack, f"multi_token.blocks.{number}.", theirs, predictor_number(stack))
    norm = {f"{number}": {"shared_head.norm": stack.width}}
    return weights + affine("multi_token.norms.", theirs, norm, bias=False)


def _weights(config: ModelConfig) -> list[Weight]:
    stack = config.last_stack
    behind = [f"model.layers.{stack.layers + number}." for number in range(config.multi_token)]
    words = tuple(f"{name}embed_tokens.weight" for name in behind)
    scores = tuple(f"{name}shared_head.head.weight" for name in behind)
    head = [replace(one, copies=scores) for one in own_head(config, _HEAD)]
    copies = words if head else (*words, *scores)
    weights = [replace(table("embedding.weight", _WORDS, config.vocab_size), copies=copies)]
    for number in range(stack.layers):
        weights += _block(stack, f"decoder.blocks.{number}.", f"model.layers.{number}.", number)
    weights += affine("decoder.", "model.", {"norm": {"norm": stack.width}}, bias=False)
    for number in range(config.multi_token):
        weights += _predictor(stack, number)
    return weights + head


def _architecture(config: ModelConfig) -> str:
    return "DeepseekV3ForCausalLM" if config.head.record.scores_words else "DeepseekV3Model"


_FAMILY = Family(
    model_type="deepseek_v3",
    read_config=_read_config,
    write_config=_write_config,
    architecture=_architecture,
    weights=_weights,
    aliases={_HEAD: _WORDS},
    prefix="model.",
    sizes=_SIZES,
)
FAMILIES = (with_heads(_FAMILY, None),)
