"""GPT-NeoX, Phi, StarCoder 2, StableLM, Falcon, Cohere and Cohere 2: LayerNorm, rotary positions.

Most add attention and feed-forward layer to the same input, by two norms or one, and rotate a part
of each head. NeoX and Falcon store queries, keys and values of a group of heads side by side; Cohere
rotates neighbouring dimensions, which here are a half apart.
"""

from functools import cache
from typing import Any

from pretrain.config.model import ModelConfig, StackConfig
from pretrain.interop.decoders.dialect import GATE_UP, LLAMA_MODULES, QK_NORMS, QKV, Dialect, Names, decoder_family
from pretrain.interop.decoders.heads import FULL, RopeKeys, periodic_types
from pretrain.interop.fields import Fields, refusal

_LAYER_NORM = {"norm": "layer", "norm_bias": True}


@cache
def _grouped(heads: int, kv_heads: int, width: int) -> tuple[int, ...]:
    """Returns the rows of queries, keys and values in groups of both and their queries."""
    queries = heads // kv_heads * width
    step = queries + 2 * width
    blocks = [range(start, start + step) for start in range(0, kv_heads * step, step)]
    parts = (slice(queries), slice(queries, queries + width), slice(queries + width, None))
    return tuple(row for part in parts for block in blocks for row in block[part])


def grouped_order(stack: StackConfig) -> tuple[int, ...]:
    """Returns our rows in theirs, where each key-value head follows its query heads."""
    return _grouped(stack.heads, stack.num_kv_heads, stack.per_head_width)


@cache
def _halves(heads: int, kv_heads: int, width: int) -> tuple[int, ...]:
    pairs = [*range(0, width, 2), *range(1, width, 2)]
    turned = [head * width + row for head in range(heads + kv_heads) for row in pairs]
    return (*turned, *range(len(turned), len(turned) + kv_heads * width))


def _halves_order(stack: StackConfig) -> tuple[int, ...]:
    """Returns our rows in theirs, where a pair of rotated dimensions are neighbours."""
    return _halves(stack.heads, stack.num_kv_heads, stack.per_head_width)


def _read_neox(fields: Fields) -> dict[str, Any]:
    own = fields.flag("attention_bias", True)
    apart = None if own else False
    is_parallel = fields.flag("use_parallel_residual", True)
    return {"parallel": is_parallel, "qkv_bias": apart, "output_bias": apart}


def _write_neox(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    return {"use_parallel_residual": stack.parallel is True, "attention_bias": stack.has_qkv_bias}


def _read_phi(fields: Fields) -> dict[str, Any]:
    return {"head.bias": True, "qk_norm": fields.flag("qk_layernorm", False) and "layer"}


def _write_phi(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    found: dict[str, Any] = {"embd_pdrop": stack.dropout, "qk_layernorm": bool(stack.qk_norm)}
    # The tanh approximation has two names in transformers, and a Phi is released with this one.
    if stack.activation == "gelu_tanh":
        found["hidden_act"] = "gelu_new"
    return found


def _phi_modules(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    names = (("query", "q_layernorm"), ("key", "k_layernorm"))
    norms = {f"attention.{ours}_norm": (f"self_attn.{theirs}",) for ours, theirs in names}
    return _PHI_MODULES | (norms if config.last_stack.qk_norm else {})


def _read_stablelm(fields: Fields) -> dict[str, Any]:
    is_parallel = fields.flag("use_parallel_residual", False)
    has_bias = fields.flag("use_qkv_bias", False)
    qk_norm = fields.flag("qk_layernorm", False) and "heads"
    found = {"qkv_bias": has_bias or None, "qk_norm": qk_norm}
    return found | {"parallel": "one_norm" if is_parallel else False}


def _write_stablelm(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    flags = {"use_parallel_residual": stack.parallel, "qk_layernorm": stack.qk_norm}
    return {"use_qkv_bias": stack.has_qkv_bias} | {key: bool(value) for key, value in flags.items()}


def _stablelm_modules(config: ModelConfig) -> dict[str, Any]:
    """Returns the modules, each head with a norm of its own."""
    stack, found = config.last_stack, _one_norm_modules(config)
    if not stack.qk_norm:
        return found
    for part, heads in (("query", stack.heads), ("key", stack.num_kv_heads)):
        norms = [f"self_attn.{part[0]}_layernorm.norms.{number}" for number in range(heads)]
        found[f"attention.{part}_norm"] = dict.fromkeys(norms, stack.per_head_width)
    return found


def _read_falcon(fields: Fields) -> dict[str, Any]:
    heads = fields.integer("num_attention_heads", 71)
    if fields.values.get("ffn_hidden_size") is None:
        fields.values["ffn_hidden_size"] = 4 * fields.integer("hidden_size", 4544)
    is_new = fields.flag("new_decoder_architecture", False)
    is_parallel = fields.flag("parallel_attn", True)
    norms = fields.optional_integer("num_ln_in_parallel_attn") or (2 if is_new else 1)
    if is_new and not is_parallel:
        why = "new_decoder_architecture adds both sub-layers to the same input"
        raise refusal("parallel_attn", False, why)
    if norms != 1 and not (is_new and norms == 2):
        why = "only 1, or with new_decoder_architecture 2, can be represented"
        raise refusal("num_ln_in_parallel_attn", norms, why)
    of_groups = fields.optional_integer("num_kv_heads") or heads
    kv_heads = of_groups if is_new else 1 if fields.flag("multi_query", True) else heads
    parallel = (norms == 2 or "one_norm") if is_parallel else False
    return {"kv_heads": None if kv_heads == heads else kv_heads, "parallel": parallel}


def _write_falcon(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    kv_heads = stack.num_kv_heads
    is_new = stack.parallel is True or (bool(stack.parallel) and kv_heads not in (1, stack.heads))
    return {
        "num_kv_heads": kv_heads,
        "new_decoder_architecture": is_new,
        "multi_query": kv_heads == 1,
        "parallel_attn": bool(stack.parallel),
        "num_ln_in_parallel_attn": 2 if stack.parallel is True else 1,
        "alibi": False,
    }


def _falcon_modules(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    parallel = config.last_stack.parallel
    norms = ("input_layernorm", "post_attention_layernorm")
    if parallel is True:
        norms = ("ln_attn", "ln_mlp")
    found: dict[str, tuple[str, ...]] = {
        "attention_norm": norms[:1],
        "attention.qkv": ("self_attention.query_key_value",),
        "attention.output": ("self_attention.dense",),
        "feedforward.up": ("mlp.dense_h_to_4h",),
        "feedforward.down": ("mlp.dense_4h_to_h",),
    }
    return found if parallel == "one_norm" else found | {"feedforward_norm": norms[1:]}


def _one_norm_modules(config: ModelConfig) -> dict[str, Any]:
    left_out = "feedforward_norm" if config.last_stack.parallel == "one_norm" else ""
    return {ours: theirs for ours, theirs in LLAMA_MODULES.items() if ours != left_out}


def _cohere_modules(config: ModelConfig) -> dict[str, Any]:
    return _one_norm_modules(config) | (QK_NORMS if config.last_stack.qk_norm else {})


def _read_cohere2(fields: Fields) -> dict[str, Any]:
    usual = periodic_types(fields, fields.integer("num_hidden_layers", 40), 4)
    listed = fields.values.get("layer_types") or usual
    kinds = listed if isinstance(listed, list) else []  # refused where windows are read
    return {"unrotated_layers": [number for number, kind in enumerate(kinds) if kind == FULL]}


_NEOX_NAMES = Names(
    prefix="gpt_neox.",
    words="gpt_neox.embed_in.weight",
    layer="gpt_neox.layers.{}.",
    norm="final_layer_norm",
    head="embed_out",
)
_NEOX_MODULES = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("attention.query_key_value",),
    "attention.output": ("attention.dense",),
    "feedforward_norm": ("post_attention_layernorm",),
    "feedforward.up": ("mlp.dense_h_to_4h",),
    "feedforward.down": ("mlp.dense_4h_to_h",),
}
_PHI_MODULES = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": QKV,
    "attention.output": ("self_attn.dense",),
    "feedforward.up": ("mlp.fc1",),
    "feedforward.down": ("mlp.fc2",),
}
_STARCODER_MODULES = {
    **{ours: theirs for ours, theirs in LLAMA_MODULES.items() if theirs != GATE_UP},
    "feedforward.up": ("mlp.c_fc",),
    "feedforward.down": ("mlp.c_proj",),
}
_EPS = {"rms_norm_eps": "layer_norm_eps"}
_COHERE_SIZES = {
    "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
    "num_attention_heads": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}  # fmt: skip
_COHERE_TOKENS = {"pad": 0, "bos": 5, "eos": 255001}
_COHERE = {"norm": "layer", "norm_bias": False, "parallel": "one_norm"}
_SCALED = {"logit_scale": ("head.scale", 0.0625)}

GPT_NEOX, PHI, STARCODER2, STABLELM, FALCON, COHERE, COHERE2 = map(
    decoder_family,
    (
        Dialect(
            model_type="gpt_neox", name="GPTNeoX", fixed_heads=True, tokens={"bos": 0, "eos": 2},
            spelled=_EPS | {"num_key_value_heads": None},
            sizes={
                "vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576,
                "num_hidden_layers": 44,
                "num_attention_heads": 64, "rms_norm_eps": 1e-5,
            },
            more={"hidden_dropout": ("dropout", 0.0)},
            built_in=_LAYER_NORM | {"activation": "gelu", "gated": False, "bias": True},
            rope=RopeKeys(theta="rotary_emb_base", share=0.25, share_key="rotary_pct"),
            names=_NEOX_NAMES,
            modules=lambda config: _NEOX_MODULES, order=grouped_order, read=_read_neox,
            write=_write_neox,
            # Causal masks that older versions saved as buffers.
            ignored=(r"gpt_neox\.layers\.\d+\.attention\.(masked_)?bias",),
            renames=((r"^lm_head\.", "embed_out."),),
        ),
        Dialect(
            model_type="phi", name="Phi", tokens={"bos": 1, "eos": 2}, spelled=_EPS,
            rope=RopeKeys(share=0.5),
            sizes={
                "vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192,
                "num_hidden_layers": 24,
                "rms_norm_eps": 1e-5,
            },
            more={"resid_pdrop": ("dropout", 0.0)}, names=Names(norm="final_layernorm"),
            built_in={"norm": "layer", "activation": "gelu_tanh", "gated": False, "bias": True, "parallel": "one_norm"},
            modules=_phi_modules, read=_read_phi, write=_write_phi,
        ),
        Dialect(
            model_type="starcoder2", name="Starcoder2", kv_heads=2, windows="all",
            tokens={"bos": 50256, "eos": 50256},
            spelled={"rms_norm_eps": "norm_epsilon"}, missing={"sliding_window": None},
            sizes={
                "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288,
                "num_hidden_layers": 30,
                "num_attention_heads": 24, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
                "tie_word_embeddings": True, "initializer_range": 0.018042,
            },
            more={"residual_dropout": ("dropout", 0.0), "use_bias": ("bias", True)},
            built_in=_LAYER_NORM | {"activation": "gelu_tanh", "gated": False},
            modules=lambda config: _STARCODER_MODULES,
            write=lambda config: {"embedding_dropout": config.last_stack.dropout},
        ),
        Dialect(
            model_type="stablelm", name="StableLm", kv_heads=32, fixed_heads=True,
            tokens={"bos": 0, "eos": 0},
            spelled=_EPS, rope=RopeKeys(share=0.25), more={"hidden_dropout": ("dropout", 0.0)},
            built_in=_LAYER_NORM,
            sizes={
                "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
            },
            modules=_stablelm_modules, read=_read_stablelm, write=_write_stablelm,
        ),
        Dialect(
            model_type="falcon", name="Falcon", fixed_heads=True, tokens={"bos": 11, "eos": 11},
            spelled={
                "rms_norm_eps": "layer_norm_epsilon", "intermediate_size": "ffn_hidden_size",
                "hidden_act": "activation", "num_key_value_heads": None,
            },
            sizes={
                "vocab_size": 65024, "hidden_size": 4544, "num_attention_heads": 71,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": True,
            },
            more={"hidden_dropout": ("dropout", 0.0), "bias": ("bias", False)},
            built_in=_LAYER_NORM | {"activation": "gelu", "gated": False},
            names=Names("transformer.", "transformer.word_embeddings.weight", "transformer.h.{}.", "ln_f"),
            refused={"alibi": (False, "scores would have a bias by distance")},
            modules=_falcon_modules, order=grouped_order, read=_read_falcon, write=_write_falcon,
        ),
        Dialect(
            model_type="cohere", name="Cohere", biases=("attention_bias",), tokens=_COHERE_TOKENS,
            spelled=_EPS,
            sizes=_COHERE_SIZES, more=_SCALED, built_in=_COHERE, missing={"rope_theta": 500000.0},
            modules=_cohere_modules, order=_halves_order, joined_norms=True,
            read=lambda fields: {"qk_norm": fields.flag("use_qk_norm", False) and "heads"},
            write=lambda config: {"use_qk_norm": bool(config.last_stack.qk_norm)},
        ),
        Dialect(
            model_type="cohere2", name="Cohere2", biases=("attention_bias",), tokens=_COHERE_TOKENS,
            spelled=_EPS,
            sizes=_COHERE_SIZES, more=_SCALED, built_in=_COHERE, windows=4, fixed_heads=True,
            modules=_one_norm_modules, order=_halves_order, read=_read_cohere2,
        ),
    ),
)  # fmt: skip
