"""LLaMA 2 and 3, Mistral, Mixtral, Qwen 2 and 3, OLMo 2 and OLMoE: one layout of tensors.

RMSNorm around each sub-layer, rotary positions, a gated feed-forward layer or experts. The families
differ in the projections that have a bias, in windows, in norms of queries and keys, in the place of
other norms, and in experts, each of whose matrices is a tensor of theirs.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pretrain.config.model import HeadConfig, ModelConfig, StackConfig
from pretrain.interop.decoders.heads import (
    FULL,
    ROTARY_BUFFERS,
    SLIDING,
    qkv_rows,
    read_heads,
    read_layer_types,
    read_rope,
    write_layer_types,
    write_rope,
)
from pretrain.interop.family import Family, Weight, affine, own_head, table
from pretrain.interop.fields import THEIR_ACTIVATIONS, Fields, Keys, build_config, refusal, write_keys, write_tokens

_WORDS = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_STACK: Keys = {
    "num_hidden_layers": ("layers", 32),
    "hidden_size": ("width", 4096),
    "num_attention_heads": ("heads", 32),
    "intermediate_size": ("ff_width", 11008),
    "rms_norm_eps": ("norm_eps", 1e-6),
    "attention_dropout": ("attention_dropout", 0.0),
}
_MODEL: Keys = {
    "vocab_size": ("vocab_size", 32000),
    "max_position_embeddings": ("max_seq_len", 2048),
    "tie_word_embeddings": ("tied_embeddings", False),
    "initializer_range": ("init_std", 0.02),
}


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


@dataclass(frozen=True, slots=True)
class _Dialect:
    """The differences of one `model_type`, with the defaults of transformers."""

    model_type: str
    name: str  # prefix of class names
    # Layers that may have one: none, all, all if a flag is set, or those listed in `layer_types`.
    windows: str
    sizes: dict[str, int]  # defaults that differ from LLaMA's
    kv_heads: int | None  # None: as many as query heads
    head_width: int | None  # None: width / heads
    tokens: dict[str, int]
    qkv_bias: bool = False  # of queries, keys and values, and nothing else
    qk_norm: bool | Literal["whole"] = False
    norm_placement: Literal["pre", "output"] = "pre"
    experts: _ExpertKeys | None = None
    missing: dict[str, Any] = field(default_factory=dict)  # further defaults


_TOKENS = {"bos": 1, "eos": 2}
_MISTRAL_SIZES = {"intermediate_size": 14336, "max_position_embeddings": 131072}
_QWEN_SIZES = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
_MIXTRAL_SIZES = {"intermediate_size": 14336, "max_position_embeddings": 131072}
_MIXTRAL_EXPERTS = _ExpertKeys(("num_local_experts",), (8, 2), "block_sparse_moe", "w1", "w3", "w2", normalizes=True)
_QWEN_MOE_SIZES = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144}
_QWEN_MOE_SIZES |= {"num_hidden_layers": 24}
_QWEN_MOE_EXPERTS = _ExpertKeys(
    ("num_local_experts", "num_experts"), (128, 8), "mlp", "gate_proj", "up_proj", "down_proj",
    width=("moe_intermediate_size", 768), mixed=True,
)  # fmt: skip
_OLMO_SIZES = {"vocab_size": 50304}
_OLMOE_SIZES = _OLMO_SIZES | {"hidden_size": 2048, "intermediate_size": 2048}
_OLMOE_SIZES |= {"num_hidden_layers": 16, "num_attention_heads": 16}
_OLMOE_EXPERTS = _ExpertKeys(("num_experts",), (64, 8), "mlp", "gate_proj", "up_proj", "down_proj")
_OLMO_TOKENS = {"pad": 1, "eos": 50279}
_DIALECTS = (
    _Dialect("llama", "Llama", "none", {}, None, None, _TOKENS),
    _Dialect("mistral", "Mistral", "all", _MISTRAL_SIZES, 8, None, _TOKENS),
    _Dialect("qwen2", "Qwen2", "listed", _QWEN_SIZES, 32, None, {}, qkv_bias=True),
    _Dialect("qwen3", "Qwen3", "listed", _QWEN_SIZES, 32, 128, {}, qk_norm=True),
    _Dialect(
        "mixtral", "Mixtral", "all", _MIXTRAL_SIZES, 8, None, _TOKENS, experts=_MIXTRAL_EXPERTS,
        missing={"rope_theta": 1e6, "rms_norm_eps": 1e-5, "sliding_window": None},
    ),
    _Dialect(
        "qwen3_moe", "Qwen3Moe", "flagged", _QWEN_MOE_SIZES, 4, None, {}, qk_norm=True, experts=_QWEN_MOE_EXPERTS,
        missing={"max_position_embeddings": 32768},
    ),
    _Dialect(
        "olmo2", "Olmo2", "none", _OLMO_SIZES, None, None, _OLMO_TOKENS, qk_norm="whole", norm_placement="output",
        missing={"rms_norm_eps": 1e-5},
    ),
    _Dialect(
        "olmoe", "Olmoe", "none", _OLMOE_SIZES, None, None, _OLMO_TOKENS, qk_norm="whole", experts=_OLMOE_EXPERTS,
        missing={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "router_aux_loss_coef": 0.01},
    ),
)  # fmt: skip


def _read_bias(dialect: _Dialect, fields: Fields) -> bool:
    """Returns whether every linear layer has a bias."""
    if dialect.model_type == "llama":
        attention = fields.flag("attention_bias", False)
        feedforward = fields.flag("mlp_bias", False)
        if attention != feedforward:
            why = f"only the value of mlp_bias={feedforward} can be represented"
            raise refusal("attention_bias", attention, why)
        return attention
    if dialect.qk_norm:
        fields.only("attention_bias", False, "the attention layers alone would have biases")
    return False


def _read_windows(dialect: _Dialect, fields: Fields, layers: int) -> dict[str, int | None]:
    """Returns the window, and the period of the layers without one."""
    if dialect.windows == "none":
        return {}
    if dialect.windows == "all":
        return {"window": fields.optional_integer("sliding_window", 4096)}
    window = None
    if fields.flag("use_sliding_window", False):
        window = fields.optional_integer("sliding_window", 4096)
    if dialect.windows == "flagged":
        return {"window": window}
    full = fields.integer("max_window_layers", 28) if window else layers
    usual = [FULL if number < full else SLIDING for number in range(layers)]
    return read_layer_types(fields, layers, window, usual)


def _write_windows(dialect: _Dialect, stack: StackConfig) -> dict[str, Any]:
    if dialect.windows == "none":
        return {}
    if dialect.windows == "all":
        return {"sliding_window": stack.window}
    if dialect.windows == "flagged":
        return {"use_sliding_window": stack.window is not None, "sliding_window": stack.window}
    slides = [window is not None for window in stack.windows]
    return {
        "use_sliding_window": any(slides),
        "sliding_window": stack.window if any(slides) else None,
        "max_window_layers": slides.index(True) if any(slides) else stack.layers,
        **write_layer_types(stack),
    }


def _read_experts(keys: _ExpertKeys, fields: Fields, hidden: int) -> dict[str, Any]:
    """Returns the keys of `experts`; `hidden` is the width of dense layers, which are none."""
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
    return {
        "count": count,
        "top_k": fields.integer("num_experts_per_tok", top_k),
        "width": None if width == hidden else width,
        "normalize": normalizes,
        **({"balance_weight": weight} if weight > 0 else {"balance": "none"}),
    }


def _write_experts(keys: _ExpertKeys, stack: StackConfig) -> dict[str, Any]:
    experts = stack.experts
    if experts is None:
        return {}
    found: dict[str, Any] = {keys.count[-1]: experts.count, "num_experts_per_tok": experts.top_k}
    found["router_aux_loss_coef"] = experts.balance_weight if experts.balance == "loss" else 0.0
    found[keys.width[0] if keys.width else "intermediate_size"] = stack.expert_width
    if keys.normalizes is None:
        found["norm_topk_prob"] = experts.normalize
    return found | ({"decoder_sparse_step": 1, "mlp_only_layers": []} if keys.mixed else {})


def _expert_tensors(keys: _ExpertKeys, stack: StackConfig) -> dict[str, dict[str, int]]:
    """Returns the tensors of a layer of experts, expert by expert."""
    experts = stack.experts
    if experts is None:
        return {}
    numbers = [f"{keys.module}.experts.{number}." for number in range(experts.count)]
    halves = [f"{name}{part}" for name in numbers for part in (keys.gate, keys.up)]
    return {
        "feedforward.router": {f"{keys.module}.gate": experts.count},
        "feedforward.gate_up": dict.fromkeys(halves, stack.expert_width),
        "feedforward.down": dict.fromkeys((f"{name}{keys.down}" for name in numbers), stack.width),
    }


def _read_config(dialect: _Dialect, values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
    fields = Fields(dialect.missing | values)
    model = fields.read(_MODEL, dialect.sizes)
    stack = fields.read(_STACK, dialect.sizes)
    width = stack["width"]
    heads = stack["heads"]
    if dialect.model_type == "llama" and width % heads:
        why = f"transformers needs a multiple of num_attention_heads={heads}"
        raise refusal("hidden_size", width, why)
    kv_heads = fields.optional_integer("num_key_value_heads", dialect.kv_heads)
    stack |= {
        **read_heads(fields, stack, kv_heads, dialect.head_width),
        "activation": fields.activation("hidden_act", "silu"),
        "bias": _read_bias(dialect, fields),
        "qkv_bias": True if dialect.qkv_bias else None,
        "qk_norm": dialect.qk_norm,
        "norm_placement": dialect.norm_placement,
        **read_rope(fields, model["max_seq_len"]),
        **_read_windows(dialect, fields, stack["layers"]),
    }
    if dialect.qk_norm == "whole":
        fields.only("clip_qkv", None, "queries, keys and values would be clipped")
        if stack["head_width"] is not None:
            raise refusal("head_dim", stack["head_width"], f"transformers needs {width // heads}, hidden_size by heads")
    if dialect.experts is not None:
        stack["experts"] = _read_experts(dialect.experts, fields, stack["ff_width"])
    claimed = fields.claims(f"{dialect.name}ForCausalLM")
    has_head = model["tied_embeddings"] or _HEAD in names or claimed
    return build_config(
        **model,
        decoder=stack,
        head=HeadConfig(kind="lm" if has_head else "none"),
        special_tokens=fields.special_tokens(**dialect.tokens),
    )


def _write_config(dialect: _Dialect, config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    # Qwen 2 has its biases built in, Mistral has none.
    biases: dict[str, bool] = {}
    if dialect.model_type == "llama":
        biases = {"attention_bias": stack.bias, "mlp_bias": stack.bias}
    elif dialect.qk_norm:
        biases = {"attention_bias": False}
    return {
        **write_keys(config, _MODEL),
        **write_keys(stack, _STACK),
        **write_tokens(config.special_tokens),
        "num_key_value_heads": stack.num_kv_heads,
        "head_dim": stack.per_head_width,
        "hidden_act": THEIR_ACTIVATIONS[stack.activation],
        **write_rope(stack),
        **_write_windows(dialect, stack),
        **biases,
        **(_write_experts(dialect.experts, stack) if dialect.experts else {}),
    }


def _weights(dialect: _Dialect, config: ModelConfig) -> list[Weight]:
    stack = config.last_stack
    width = stack.width
    norms = {
        "attention_norm": {"input_layernorm": width},
        "feedforward_norm": {"post_attention_layernorm": width},
    }
    if dialect.norm_placement == "output":
        norms["attention_norm"] = {"post_attention_layernorm": width}
        norms["feedforward_norm"] = {"post_feedforward_layernorm": width}
    if stack.qk_norm:
        norms["attention.query_norm"] = {"self_attn.q_norm": stack.qk_norm_width(stack.heads)}
        norms["attention.key_norm"] = {"self_attn.k_norm": stack.qk_norm_width(stack.num_kv_heads)}
    qkv = {"attention.qkv": qkv_rows(stack)}
    linears = {
        "attention.output": {"self_attn.o_proj": width},
        "feedforward.gate_up": {f"mlp.{part}_proj": stack.ff_width for part in ("gate", "up")},
        "feedforward.down": {"mlp.down_proj": width},
    }
    if dialect.experts is not None:
        linears |= _expert_tensors(dialect.experts, stack)
    found = [table("embedding.weight", _WORDS, config.vocab_size)]
    for number in range(stack.layers):
        ours, theirs = f"decoder.blocks.{number}.", f"model.layers.{number}."
        found += affine(ours, theirs, norms, bias=False)
        found += affine(ours, theirs, qkv, bias=stack.has_qkv_bias)
        found += affine(ours, theirs, linears, bias=stack.bias)
    found += affine("decoder.", "model.", {"norm": {"norm": width}}, bias=False)
    return found + own_head(config, _HEAD)


def _architecture(dialect: _Dialect, config: ModelConfig) -> str:
    return f"{dialect.name}ForCausalLM" if config.head.kind == "lm" else f"{dialect.name}Model"


LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, OLMO2, OLMOE = (
    Family(
        model_type=dialect.model_type,
        read_config=partial(_read_config, dialect),
        write_config=partial(_write_config, dialect),
        architecture=partial(_architecture, dialect),
        weights=partial(_weights, dialect),
        aliases={_HEAD: _WORDS},
        ignored=(ROTARY_BUFFERS,),
        prefix="model.",
    )
    for dialect in _DIALECTS
)
