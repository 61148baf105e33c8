"""LLaMA 2 and 3, Mistral, Mixtral, Qwen 2 and 3, OLMo 1 to 3, OLMoE, SmolLM 3, Granite, Phi-3.

RMSNorm around each sub-layer (OLMo 1: LayerNorm without weights), rotary positions, a gated feed-forward
layer or experts. The families differ in the projections that have a bias, in windows, in norms of
queries and keys, in the place of other norms, in layers without rotation, in constant factors, and in
experts, each of whose matrices is a tensor of theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pretrain.config.model import ModelConfig
from pretrain.interop.decoders.dialect import LLAMA_MODULES, QK_NORMS, Dialect, Names, decoder_family
from pretrain.interop.decoders.heads import FULL, SLIDING, RopeKeys, read_layer_types, write_layer_types
from pretrain.interop.fields import Fields, refusal


@dataclass(frozen=True, slots=True)
class _ExpertKeys:
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


def _read_experts(keys: _ExpertKeys, fields: Fields) -> dict[str, Any]:
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


def _write_experts(keys: _ExpertKeys, config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    experts = stack.experts
    if experts is None:
        return {}
    found: dict[str, Any] = {keys.count[-1]: experts.count, "num_experts_per_tok": experts.top_k}
    found["router_aux_loss_coef"] = experts.balance_weight if experts.balance == "loss" else 0.0
    found[keys.width[0] if keys.width else "intermediate_size"] = stack.expert_width
    if keys.normalizes is None:
        found["norm_topk_prob"] = experts.normalize
    return found | ({"decoder_sparse_step": 1, "mlp_only_layers": []} if keys.mixed else {})


def _with_experts(keys: _ExpertKeys, modules: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Returns the modules of a block with a layer of experts, expert by expert."""
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


def _expert_hooks(keys: _ExpertKeys, modules: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "read": partial(_read_experts, keys),
        "write": partial(_write_experts, keys),
        "modules": partial(_with_experts, keys, modules),
    }


def _read_smollm3(fields: Fields) -> dict[str, Any]:
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
    found = read_layer_types(fields, layers, window, usual)
    return found | {"unrotated_layers": [number for number in range(layers) if not rotated[number]]}


def _write_smollm3(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    slides = any(window is not None for window in stack.windows)
    numbers = range(stack.layers)
    return {
        "no_rope_layers": [int(number not in stack.unrotated_layers) for number in numbers],
        "use_sliding_window": slides,
        "sliding_window": stack.window if slides else None,
        **write_layer_types(stack),
    }


def _read_granite(fields: Fields) -> dict[str, Any]:
    divisor = fields.number("logits_scaling", 1.0)
    if divisor <= 0:
        raise refusal("logits_scaling", divisor, "must be more than 0")
    return {"head.scale": 1 / divisor}


def _write_granite(config: ModelConfig) -> dict[str, Any]:
    # Rounded: the inverse of an inverse is not always the number itself.
    factor = config.last_stack.score_scale or config.last_stack.per_head_width**-0.5
    divisor = float(f"{1 / config.head.scale:.12g}")
    return {"logits_scaling": divisor, "attention_multiplier": factor}


_QK_NORM_MODULES = {**LLAMA_MODULES, **QK_NORMS}
_OUTPUT_NORMS = {
    **_QK_NORM_MODULES,
    "attention_norm": ("post_attention_layernorm",),
    "feedforward_norm": ("post_feedforward_layernorm",),
}
_TOKENS = {"bos": 1, "eos": 2}
_QWEN_SIZES = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
_MIXTRAL_EXPERTS = _ExpertKeys(("num_local_experts",), (8, 2), "block_sparse_moe", "w1", "w3", "w2", normalizes=True)
_QWEN_EXPERTS = _ExpertKeys(
    ("num_local_experts", "num_experts"), (128, 8), "mlp", "gate_proj", "up_proj", "down_proj",
    width=("moe_intermediate_size", 768), mixed=True,
)  # fmt: skip
_OLMOE_EXPERTS = _ExpertKeys(("num_experts",), (64, 8), "mlp", "gate_proj", "up_proj", "down_proj")
_OLMO: dict[str, Any] = {
    "sizes": {"vocab_size": 50304, "rms_norm_eps": 1e-5},
    "tokens": {"pad": 1, "eos": 50279},
    "fixed_heads": True,
}
_UNWEIGHTED = {ours: theirs for ours, theirs in LLAMA_MODULES.items() if not ours.endswith("norm")}
_PHI3_MODULES = {
    **LLAMA_MODULES,
    "attention.qkv": ("self_attn.qkv_proj",),
    "feedforward.gate_up": ("mlp.gate_up_proj",),
}
_CLIPPED = {"clip_qkv": (None, "queries, keys and values would be clipped")}
_NORMED_OUTPUTS = {"qk_norm": "whole", "norm_placement": "output"}
_NO_BIASES = (False, "the attention layers would have biases, and experts none")
_ATTENTION = ("attention_bias",)
_BOTH = ("attention_bias", "mlp_bias")

_DIALECTS = (
    Dialect(model_type="llama", name="Llama", tokens=_TOKENS, biases=_BOTH, divides=True),
    Dialect(
        model_type="mistral", name="Mistral", windows="all", kv_heads=8, tokens=_TOKENS,
        sizes={"intermediate_size": 14336, "max_position_embeddings": 131072},
    ),
    Dialect(
        model_type="mixtral", name="Mixtral", windows="all", kv_heads=8, tokens=_TOKENS,
        sizes={"max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
        missing={"intermediate_size": 14336, "rope_theta": 1e6, "sliding_window": None},
        **_expert_hooks(_MIXTRAL_EXPERTS, LLAMA_MODULES),
    ),
    Dialect(
        model_type="qwen2", name="Qwen2", windows="listed", sizes=_QWEN_SIZES, kv_heads=32,
        built_in={"qkv_bias": True},
    ),
    Dialect(
        model_type="qwen3", name="Qwen3", windows="listed", sizes=_QWEN_SIZES, kv_heads=32,
        head_width=128,
        built_in={"qk_norm": True}, biases=_ATTENTION, modules=lambda config: _QK_NORM_MODULES,
    ),
    Dialect(
        model_type="qwen3_moe", name="Qwen3Moe", windows="flagged", kv_heads=4,
        sizes={"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "max_position_embeddings": 32768},
        built_in={"qk_norm": True}, missing={"intermediate_size": 6144},
        refused={"attention_bias": _NO_BIASES},
        **_expert_hooks(_QWEN_EXPERTS, _QK_NORM_MODULES),
    ),
    Dialect(
        model_type="olmo", name="Olmo", biases=_ATTENTION, refused=_CLIPPED, names=Names(norm=""),
        built_in={"norm": "unweighted", "norm_eps": 1e-5}, spelled={"rms_norm_eps": None},
        modules=lambda config: _UNWEIGHTED, **_OLMO,
    ),
    Dialect(
        model_type="olmo2", name="Olmo2", built_in=_NORMED_OUTPUTS, biases=_ATTENTION,
        refused=_CLIPPED,
        modules=lambda config: _OUTPUT_NORMS, **_OLMO,
    ),
    Dialect(
        model_type="olmo3", name="Olmo3", windows=4, built_in=_NORMED_OUTPUTS, biases=_ATTENTION,
        rope=RopeKeys(local=(None, 500000.0)), missing={"rope_theta": 500000.0},
        modules=lambda config: _OUTPUT_NORMS, **_OLMO,
    ),
    Dialect(
        model_type="olmoe", name="Olmoe", tokens=_OLMO["tokens"], fixed_heads=True,
        sizes={
            "vocab_size": 50304, "hidden_size": 2048, "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        },
        missing={"intermediate_size": 2048, "router_aux_loss_coef": 0.01},
        built_in={"qk_norm": "whole"},
        refused=_CLIPPED | {"attention_bias": _NO_BIASES},
        **_expert_hooks(_OLMOE_EXPERTS, _QK_NORM_MODULES),
    ),
    Dialect(
        model_type="smollm3", name="SmolLM3", biases=_BOTH, kv_heads=4,
        missing={"rope_theta": 2000000.0},
        sizes={
            "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "max_position_embeddings": 32768, "tie_word_embeddings": True,
        },
        tokens={"pad": 128004, "bos": 128000, "eos": 128001}, read=_read_smollm3,
        write=_write_smollm3,
    ),
    Dialect(
        model_type="granite", name="Granite", biases=_BOTH, tokens=_TOKENS, read=_read_granite,
        write=_write_granite,
        more={
            "attention_multiplier": ("score_factor", 1.0),
            "residual_multiplier": ("residual_scale", 1.0),
            "embedding_multiplier": ("model.embedding_scale", 1.0),
        },
    ),
    Dialect(
        model_type="phi3", name="Phi3", windows="all",
        tokens={"pad": 32000, "bos": 1, "eos": 32000},
        sizes={
            "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        missing={"sliding_window": None, "original_max_position_embeddings": 4096},
        more={"resid_pdrop": ("dropout", 0.0)}, modules=lambda config: _PHI3_MODULES,
        rope=RopeKeys(share=1.0, kinds=("longrope",), renamed=("su", "yarn")),
    ),
)  # fmt: skip
_FAMILIES = map(decoder_family, _DIALECTS)
LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, OLMO, OLMO2, OLMO3, OLMOE, SMOLLM3, GRANITE, PHI3 = _FAMILIES
