"""DeepSeek-V2 and V3: latent attention, and experts chosen by groups, in V3 by biases too, after some dense layers.

Their heads have the rotated dimensions last, in pairs of neighbours; ours have them first, in two
halves. Scores depend on neither order, so rows of the projections are exchanged in ours.

Modules that predict further tokens (2.2) are their layers behind the last one, with copies of
embedding and head. transformers neither reads nor saves them, so they are known by their names.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

from pretrain.config.model import ModelConfig, StackConfig
from pretrain.config.model.parts.further_tokens import predictor_number
from pretrain.families.config_json import Fields, Keys, build_config, refusal
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import LLAMA_MODULES, Dialect, LayerWeights, decoder_family
from pretrain.families.expert_keys import ExpertKeys
from pretrain.families.family import Family, Weight, affine
from pretrain.families.rotary_keys import OF_ONE_LENGTH, read_rope, write_rope
from pretrain.families.sizes import Architecture, Values

_DEEPSEEK_V3 = Architecture(
    ("decoder",),
    LLAMA_STACK | {"norm_eps": 1e-6, "head_width": 192},
    {"max_seq_len": 163840, "tied_embeddings": False},
)
"""DeepSeek-AI 2024 (DeepSeek-V3), 2.1 and 4.2, and as released, after the extension of its context."""

_DEEPSEEK_V2 = Architecture(
    ("decoder",),
    _DEEPSEEK_V3.stack,
    {"max_seq_len": 163840, "tied_embeddings": False},
)
"""DeepSeek-AI 2024 (DeepSeek-V2), 2.1 and 2.2, and as released."""
_STRETCHED = {
    "kind": "yarn", "factor": 40.0, "original_max_seq_len": 4096, "attention_factor": 1.0,
    "score_mscale": 0.707,
}  # fmt: skip


def _by_scores(count: int, top_k: int, width: int, **other: Any) -> Values:
    kinds = {"normalize": False, "balance_weight": 0.001}
    return {"count": count, "top_k": top_k, "width": width, **kinds, **other}


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
_V2_SIZES = {
    # DeepSeek-AI 2024 (DeepSeek-V2), 3.1.2 and appendix B; of 15.7B and 236B parameters 2.4B and 21B meet a token.
    "deepseek_v2-lite": _DEEPSEEK_V2.size(
        27, 2048, 16, 10944, of=(102400, 15_706_484_224),
        latent={"kv_rank": 512, "rope_width": 64, "value_width": 128},
        experts=_by_scores(64, 6, 1408, shared=2, first=1), rope_scaling=_STRETCHED,
    ),
    "deepseek_v2-236b": _DEEPSEEK_V2.size(
        60, 5120, 128, 12288, of=(102400, 235_741_434_880),
        latent={"query_rank": 1536, "kv_rank": 512, "rope_width": 64, "value_width": 128},
        experts=_by_scores(
            160, 6, 1536, shared=2, first=1, scale=16.0, groups=8, top_groups=3, group_scores=1
        ),
        rope_scaling=_STRETCHED,
    ),
    "deepseek_v2-tiny": _DEEPSEEK_V2.size(
        2, 64, 4, 192, max_seq_len=128, head_width=24,
        latent={"query_rank": 32, "kv_rank": 24, "rope_width": 8, "value_width": 16},
        experts=_by_scores(8, 2, 48, shared=1, first=1, groups=4, top_groups=2, group_scores=1),
    ),
}  # fmt: skip
_HEAD = "lm_head.weight"
_JOIN = "eh_proj"
_LATENT: Keys = {
    "kv_lora_rank": ("kv_rank", 512),
    "qk_rope_head_dim": ("rope_width", 64),
    "v_head_dim": ("value_width", 128),
}
_NORM_EPS = 1e-6
"""Of the norms of latent vectors, which no key changes."""
SHARED: Keys = {"n_shared_experts": ("shared", 1), "first_k_dense_replace": ("first", 3)}
V3_EXPERTS = ExpertKeys(
    ("n_routed_experts",), (256, 8), "mlp", "gate_proj", "up_proj", "down_proj",
    width=("moe_intermediate_size", 2048), shared="shared_experts",
    more={
        **SHARED, "n_group": ("groups", 8), "topk_group": ("top_groups", 4),
        "routed_scaling_factor": ("scale", 2.5), "norm_topk_prob": ("normalize", True),
    },
    bias="gate.e_score_correction_bias",
)  # fmt: skip
_V2_EXPERTS = replace(
    V3_EXPERTS, defaults=(64, 6), width=("moe_intermediate_size", 1407), normalizes=False, bias="",
    more={
        "n_shared_experts": ("shared", 2), "first_k_dense_replace": ("first", 0),
        "routed_scaling_factor": ("scale", 1.0),
    },
)  # fmt: skip
_GROUPS: Keys = {"n_group": ("groups", 1), "topk_group": ("top_groups", 1)}


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


def read_latent(length: int, fields: Fields) -> dict[str, Any]:
    """Returns latent attention and its positions; `length` is the default of `max_position_embeddings`."""
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.optional_integer("num_key_value_heads", heads)
    if kv_heads not in (None, heads):
        raise refusal("num_key_value_heads", kv_heads, f"only num_attention_heads={heads} has a meaning")
    latent = fields.read(_LATENT) | {"query_rank": fields.optional_integer("q_lora_rank", 1536)}
    if fields.number("rms_norm_eps", _NORM_EPS) != _NORM_EPS:
        latent["norm_eps"] = _NORM_EPS
    width = fields.integer("qk_nope_head_dim", 128) + latent["rope_width"]
    # A value of another width, in some files.
    fields.values.pop("head_dim", None)
    return {
        "head_width": None if width * heads == fields.integer("hidden_size") else width,
        "latent": latent,
        **_read_rope(fields, fields.integer("max_position_embeddings", length)),
    }


def write_latent(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of latent attention and its positions."""
    stack = config.last_stack
    latent, rope = stack.latent, write_rope(stack)
    if stack.rope_scaling is not None and stack.rope_scaling.score_mscale:
        rope["rope_scaling"] |= {"mscale_all_dim": stack.rope_scaling.score_mscale}
    if latent is None:
        return rope
    return {
        **rope,
        **{key: getattr(latent, ours) for key, (ours, _) in _LATENT.items()},
        "q_lora_rank": latent.query_rank,
        "qk_nope_head_dim": stack.per_head_width - latent.rope_width,
        "head_dim": latent.rope_width,
    }


def latent_weights(stack: StackConfig) -> list[Weight]:
    """Returns the weights of latent attention, as `Dialect.further`."""
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
        Weight(f"attention.{name}.weight", ((f"self_attn.{part}.weight", rows),), order=order)
        for name, (part, rows, order) in parts.items()
    ]


WITHOUT_HEADS = {ours: theirs for ours, theirs in LLAMA_MODULES.items() if not ours.startswith("attention.")}
"""Modules of a layer whose attention is latent."""
LATENT: dict[str, Any] = {
    "rope": OF_ONE_LENGTH,
    "refused": {
        "attention_bias": (False, "projections to latent vectors would have biases"),
        "rope_interleave": (True, "rotated dimensions would be in two halves"),
    },
}
"""Fields of a `Dialect` whose attention is latent."""


def latent_hooks(keys: ExpertKeys, length: int) -> dict[str, Any]:
    """Returns the fields of a `Dialect` with latent attention and experts."""

    def read(fields: Fields) -> dict[str, Any]:
        values = keys.read(fields)
        if (shared := values["experts"]["shared"]) < 1:
            raise refusal("n_shared_experts", shared, "transformers has 1 or more")
        return read_latent(length, fields) | values

    return LATENT | {
        "read": read,
        "write": lambda config: write_latent(config) | keys.write(config),
        "modules": partial(keys.modules, WITHOUT_HEADS),
        "further": lambda stack: latent_weights(stack) + keys.further(stack),
    }


def _read_v2(fields: Fields) -> dict[str, Any]:
    # Nulls are transformers' own defaults: no groups, and no choice of a number.
    for key in ("n_group", "topk_group", "num_experts_per_tok"):
        if fields.values.get(key) is None:
            fields.values.pop(key, None)
    values = _V2["read"](fields)
    method, groups = fields.values.get("topk_method", "greedy"), fields.read(_GROUPS)
    if method == "group_limited_greedy":
        values["experts"] |= groups | {"group_scores": 1}
    elif method != "greedy":
        raise refusal("topk_method", method, "only 'greedy' and 'group_limited_greedy' can be represented")
    return dict(values)


def _write_v2(config: ModelConfig) -> dict[str, Any]:
    experts = config.last_stack.experts
    values = _V2["write"](config)
    values.pop("router_aux_loss_coef", None)
    if experts is None or experts.groups == 1:
        return values | {"topk_method": "greedy"}
    groups = {"n_group": experts.groups, "topk_group": experts.top_groups}
    return values | groups | {"topk_method": "group_limited_greedy"}


def _predictor(layers: LayerWeights, number: int) -> list[Weight]:
    """Returns the weights of a module that predicts a further token, without those that it shares."""
    stack = layers.stack
    ours, theirs = f"multi_token.inputs.{number}.", f"model.layers.{stack.layers + number}."
    norms = {"embedding_norm": {"enorm": stack.width}, "hidden_norm": {"hnorm": stack.width}}
    weights = affine(ours, theirs, norms | {"projection": {_JOIN: stack.width}}, bias=False)
    weights += layers.at((f"multi_token.blocks.{number}.", theirs), predictor_number(stack))
    norm = {f"{number}": {"shared_head.norm": stack.width}}
    return weights + affine("multi_token.norms.", theirs, norm, bias=False)


def _weights(family: Family, dialect: Dialect, config: ModelConfig) -> list[Weight]:
    weights = family.weights(config)
    if not config.multi_token:
        return weights
    layers = LayerWeights.of(dialect, config)
    behind = [f"model.layers.{layers.stack.layers + number}." for number in range(config.multi_token)]
    words = tuple(f"{name}embed_tokens.weight" for name in behind)
    scores = tuple(f"{name}shared_head.head.weight" for name in behind)
    has_head = any(one.ours == "head.weight" for one in weights)
    copies = {"embedding.weight": words if has_head else (*words, *scores), "head.weight": scores}
    weights = [replace(one, copies=copies.get(one.ours, ())) for one in weights]
    for number in range(config.multi_token):
        weights += _predictor(layers, number)
    return weights


def with_predictors(dialect: Dialect) -> Family:
    """Returns the family of a table, whose files may have modules that predict further tokens."""
    family = decoder_family(dialect)

    def read(values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
        config = family.read_config(values, names)
        further, layers = 0, config.last_stack.layers
        while f"model.layers.{layers + further}.{_JOIN}.weight" in names:
            further += 1
        return build_config(**config.model_dump() | {"multi_token": further}) if further else config

    def write(config: ModelConfig) -> dict[str, Any]:
        return family.write_config(config) | {"num_nextn_predict_layers": config.multi_token}

    weights = partial(_weights, family, dialect)
    return replace(family, read_config=read, write_config=write, weights=weights)


_V2 = latent_hooks(_V2_EXPERTS, 2048)
_V2_REFUSED = {
    "attention_bias": LATENT["refused"]["attention_bias"],
    "mlp_bias": (False, "the dense layers would have biases, and experts none"),
    "norm_topk_prob": (False, "transformers has the scores themselves"),
}
FAMILIES = (
    with_predictors(
        Dialect(
            model_type="deepseek_v3", name="DeepseekV3", sizes=_SIZES, tokens={"bos": 0, "eos": 1},
            defaults={
                "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
                "num_attention_heads": 128, "max_position_embeddings": 4096,
            },
            missing={"intermediate_size": 18432, "hidden_size": 7168, "num_attention_heads": 128},
            **latent_hooks(V3_EXPERTS, 4096),
        )
    ),
    decoder_family(
        Dialect(
            model_type="deepseek_v2", name="DeepseekV2", sizes=_V2_SIZES, tokens={"bos": 1, "eos": 2},
            defaults={"vocab_size": 102400},
            missing={"intermediate_size": 11008, "hidden_size": 4096, "num_attention_heads": 32},
            **_V2 | {"read": _read_v2, "write": _write_v2, "refused": _V2_REFUSED},
        )
    ),
)  # fmt: skip
