"""Rotary parameters of a config.json, in the spellings of transformers 4 (`rope_theta`, `rope_scaling`) and 5."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig, StackConfig
from pretrain.interop.family import Family, Weight
from pretrain.interop.fields import THEIR_ACTIVATIONS, Fields, build_config, refusal

DEFAULT_THETA = 10000.0

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def read_rope(fields: Fields, max_seq_len: int) -> tuple[float, dict[str, Any] | None]:
    """Returns the base period and the scaling (values of `RotaryScaling`) of one rotary embedding for all layers.

    Raises:
        ConfigError: A kind of scaling, or a part of a head that is not rotated, which ours cannot do.
    """
    key = "rope_scaling" if fields.section("rope_scaling") else "rope_parameters"
    rope = Fields(fields.section(key))
    if _LAYER_TYPES & rope.values.keys():
        raise refusal(key, rope.values, "one rotary embedding for all layers can be represented")
    for holder in (fields, rope):
        holder.only("partial_rotary_factor", 1.0, "a part of each head would not be rotated")
    theta = rope.number("rope_theta", fields.number("rope_theta", DEFAULT_THETA))
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, {"kind": "linear", "factor": rope.number("factor")}
    if kind != "llama3":
        raise refusal(f"{key}.rope_type", kind, "only default, linear and llama3 can be represented")
    length = rope.integer("original_max_position_embeddings", max_seq_len)
    return theta, {
        "kind": "llama3",
        "factor": rope.number("factor"),
        "original_max_seq_len": fields.integer("original_max_position_embeddings", length),
        "low_freq_factor": rope.number("low_freq_factor"),
        "high_freq_factor": rope.number("high_freq_factor"),
    }


def write_rope(stack: StackConfig) -> dict[str, Any]:
    """Returns `rope_theta` and `rope_scaling`: the older spelling, which every version reads."""
    scaling = stack.rope_scaling
    if scaling is None:
        return {"rope_theta": stack.rope_theta, "rope_scaling": None}
    values: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        values |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    return {"rope_theta": stack.rope_theta, "rope_scaling": values}


# LLaMA 2 and 3, Mistral, Qwen 2 and Qwen 3: one layout of tensors, four readings of config.json.
#
# RMSNorm before each sub-layer, rotary positions, a gated feed-forward layer. They differ in which
# projections have a bias, in windows, and in norms of queries and keys.


@dataclass(frozen=True, slots=True)
class _Dialect:
    """What sets one `model_type` apart.

    Attributes:
        model_type: `model_type` of config.json.
        name: What class names begin with.
        sizes: What transformers reads where config.json lacks a key.
        windows: Which layers may have a window: none, all, or those that `layer_types` names.
        qkv_bias: Queries, keys and values have a bias and nothing else does.
        qk_norm: Queries and keys are normalised.
    """

    model_type: str
    name: str
    sizes: dict[str, int | None]
    windows: str
    qkv_bias: bool = False
    qk_norm: bool = False


_COMMON = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "head_dim": None}

_LLAMA = _Dialect(
    "llama",
    "Llama",
    _COMMON
    | {
        "vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None, "max_position_embeddings": 2048,
        "bos": 1, "eos": 2,
    },
    windows="none",
)  # fmt: skip

_MISTRAL = _Dialect(
    "mistral",
    "Mistral",
    _COMMON
    | {
        "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "bos": 1, "eos": 2,
    },
    windows="all",
)  # fmt: skip

_QWEN_SIZES = _COMMON | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    "bos": None, "eos": None,
}  # fmt: skip

_QWEN2 = _Dialect("qwen2", "Qwen2", _QWEN_SIZES, windows="listed", qkv_bias=True)

_QWEN3 = _Dialect("qwen3", "Qwen3", _QWEN_SIZES | {"head_dim": 128}, windows="listed", qk_norm=True)


def _read_bias(dialect: _Dialect, fields: Fields) -> bool:
    """Returns whether every linear layer has a bias; ours has all, none, or those of queries, keys and values."""
    if dialect.model_type == "llama":
        attention, feedforward = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
        if attention != feedforward:
            raise refusal("attention_bias", attention, f"only the value of mlp_bias={feedforward} can be represented")
        return attention
    if dialect.model_type == "qwen3":
        fields.only("attention_bias", False, "the attention layers alone would have biases")
    return False


def _read_windows(dialect: _Dialect, fields: Fields, layers: int) -> tuple[int | None, int | None]:
    """Returns the window, and every how many layers there is none (None: all have it)."""
    if dialect.windows == "none":
        return None, None
    if dialect.windows == "all":
        return fields.optional_integer("sliding_window", 4096), None
    window = fields.optional_integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    listed = fields.values.get("layer_types")
    if listed is None:
        full = fields.integer("max_window_layers", 28) if window else layers
        listed = ["full_attention" if number < full else "sliding_attention" for number in range(layers)]
    elif not isinstance(listed, list) or len(listed) != layers:
        raise refusal("layer_types", listed, f"must list {layers} layers")
    if unknown := [kind for kind in listed if kind not in ("full_attention", "sliding_attention")]:
        raise refusal("layer_types", unknown[0], "only full_attention and sliding_attention can be represented")
    slides = [kind == "sliding_attention" for kind in listed]
    if not any(slides):
        return None, None
    if window is None:
        raise refusal("layer_types", listed, "sliding_attention needs use_sliding_window=true and a sliding_window")
    if all(slides):
        return window, None
    for every in range(2, layers + 1):
        if slides == [number % every != 0 for number in range(layers)]:
            return window, every
    raise refusal("layer_types", listed, "only every n-th layer, from the first, can be without a window")


def _read_config(dialect: _Dialect, values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
    fields, sizes = Fields(values), dialect.sizes
    layers = fields.integer("num_hidden_layers", sizes["num_hidden_layers"])
    width, heads = (fields.integer(key, sizes[key]) for key in ("hidden_size", "num_attention_heads"))
    if dialect.model_type == "llama" and width % heads:
        raise refusal("hidden_size", width, f"transformers needs a multiple of num_attention_heads={heads}")
    max_seq_len = fields.integer("max_position_embeddings", sizes["max_position_embeddings"])
    kv_heads = fields.optional_integer("num_key_value_heads", sizes["num_key_value_heads"])
    head_width = fields.optional_integer("head_dim", sizes["head_dim"])
    theta, scaling = read_rope(fields, max_seq_len)
    window, global_every = _read_windows(dialect, fields, layers)
    stack = {
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": None if kv_heads == heads else kv_heads,
        "head_width": None if head_width is not None and head_width * heads == width else head_width,
        "ff_width": fields.integer("intermediate_size", sizes["intermediate_size"]),
        "activation": fields.activation("hidden_act", "silu"),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "bias": _read_bias(dialect, fields),
        "qkv_bias": True if dialect.qkv_bias else None,
        "qk_norm": dialect.qk_norm,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "window": window,
        "global_every": global_every,
        "attention_dropout": fields.number("attention_dropout", 0.0),
    }
    tied = fields.flag("tie_word_embeddings", False)
    has_head = tied or "lm_head.weight" in names or fields.claims(f"{dialect.name}ForCausalLM")
    return build_config(
        decoder=stack,
        head=HeadConfig(kind="lm" if has_head else "none"),
        vocab_size=fields.integer("vocab_size", sizes["vocab_size"]),
        max_seq_len=max_seq_len,
        tied_embeddings=tied,
        init_std=fields.number("initializer_range", 0.02),
        special_tokens=fields.special_tokens(bos=sizes["bos"], eos=sizes["eos"]),
    )


def _write_windows(dialect: _Dialect, stack: StackConfig) -> dict[str, Any]:
    if dialect.windows == "none":
        return {}
    if dialect.windows == "all":
        return {"sliding_window": stack.window}
    slides = [window is not None for window in stack.windows]
    return {
        "use_sliding_window": any(slides),
        "sliding_window": stack.window if any(slides) else None,
        "max_window_layers": slides.index(True) if any(slides) else stack.layers,
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
    }


def _write_config(dialect: _Dialect, config: ModelConfig) -> dict[str, Any]:
    stack, tokens = config.last_stack, config.special_tokens
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": stack.width,
        "intermediate_size": stack.ff_width,
        "num_hidden_layers": stack.layers,
        "num_attention_heads": stack.heads,
        "num_key_value_heads": stack.num_kv_heads,
        "head_dim": stack.per_head_width,
        "hidden_act": THEIR_ACTIVATIONS[stack.activation],
        "max_position_embeddings": config.max_seq_len,
        "initializer_range": config.init_std,
        "rms_norm_eps": stack.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_dropout": stack.attention_weight_dropout,
        "bos_token_id": tokens.bos,
        "eos_token_id": tokens.eos,
        "pad_token_id": tokens.pad,
        **write_rope(stack),
        **_write_windows(dialect, stack),
    }
    if dialect.model_type == "llama":
        values |= {"attention_bias": stack.bias, "mlp_bias": stack.bias}
    if dialect.model_type == "qwen3":
        values |= {"attention_bias": False}
    return values


def _weights(dialect: _Dialect, config: ModelConfig) -> list[Weight]:
    stack = config.last_stack
    head = stack.per_head_width
    qkv_rows = {"q_proj": stack.heads * head, "k_proj": stack.num_kv_heads * head, "v_proj": stack.num_kv_heads * head}
    linears = [
        ("attention.qkv", [(f"self_attn.{name}", rows) for name, rows in qkv_rows.items()], stack.has_qkv_bias),
        ("attention.output", [("self_attn.o_proj", stack.width)], stack.bias),
        ("feedforward.gate_up", [(f"mlp.{name}_proj", stack.ff_width) for name in ("gate", "up")], stack.bias),
        ("feedforward.down", [("mlp.down_proj", stack.width)], stack.bias),
    ]
    norms = [
        ("attention_norm", "input_layernorm", stack.width),
        ("feedforward_norm", "post_attention_layernorm", stack.width),
    ]
    if stack.qk_norm:
        norms += [("attention.query_norm", "self_attn.q_norm", head), ("attention.key_norm", "self_attn.k_norm", head)]
    assert config.vocab_size is not None
    found = [Weight("embedding.weight", (("model.embed_tokens.weight", config.vocab_size),), vocab=True)]
    for number in range(stack.layers):
        ours, theirs = f"decoder.blocks.{number}.", f"model.layers.{number}."
        found += [Weight(f"{ours}{a}.weight", ((f"{theirs}{b}.weight", rows),)) for a, b, rows in norms]
        for name, parts, has_bias in linears:
            for kind in ("weight", "bias") if has_bias else ("weight",):
                stacked = tuple((f"{theirs}{part}.{kind}", rows) for part, rows in parts)
                found.append(Weight(f"{ours}{name}.{kind}", stacked))
    found.append(Weight("decoder.norm.weight", (("model.norm.weight", stack.width),)))
    if config.head.kind == "lm" and not config.tied_embeddings:
        found.append(Weight("head.weight", (("lm_head.weight", config.vocab_size),), vocab=True))
    return found


def _aliases(config: ModelConfig) -> dict[str, str]:
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.tied_embeddings else {}


def _architecture(dialect: _Dialect, config: ModelConfig) -> str:
    return f"{dialect.name}ForCausalLM" if config.head.kind == "lm" else f"{dialect.name}Model"


def _family(dialect: _Dialect) -> Family:
    return Family(
        model_type=dialect.model_type,
        read_config=partial(_read_config, dialect),
        write_config=partial(_write_config, dialect),
        architecture=partial(_architecture, dialect),
        weights=partial(_weights, dialect),
        aliases=_aliases,
        ignored=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
        prefix="model.",
    )


LLAMA, MISTRAL, QWEN2, QWEN3 = (_family(dialect) for dialect in (_LLAMA, _MISTRAL, _QWEN2, _QWEN3))
