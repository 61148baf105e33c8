"""Falcon (Almazrouei et al. 2023): both sub-layers read the same input, by one norm or by two.

Queries, keys and values of a group of heads are stored side by side.
"""

from typing import Any

from pretrain.config.model import ModelConfig
from pretrain.families.config_json import Fields, refusal
from pretrain.families.decoders.gpt_neox import LAYER_NORM, grouped_order
from pretrain.families.dialect import Dialect, Names, decoder_family
from pretrain.families.sizes import Architecture

_FALCON = Architecture(
    ("decoder",),
    {
        "activation": "gelu",
        "gated": False,
        "norm": "layer",
        "norm_bias": True,
        "bias": False,
        "position": "rotary",
        "parallel": "one_norm",
    },
    {"max_seq_len": 2048, "tied_embeddings": True},
)
"""Almazrouei et al. 2023 (Falcon), 4; 40B and larger have two norms, as released."""
_SIZES = {
    # Almazrouei et al. 2023, table 8.
    "falcon-7b": _FALCON.size(32, 4544, 71, 18176, of=(65024, 6_921_720_704), kv_heads=1),
    "falcon-40b": _FALCON.size(
        60, 8192, 128, 32768, of=(65024, 41_303_293_952), kv_heads=8, parallel=True
    ),
    "falcon-tiny": _FALCON.size(2, 64, 4, 256, max_seq_len=128, kv_heads=1),
}  # fmt: skip


def _read(fields: Fields) -> dict[str, Any]:
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


def _write(config: ModelConfig) -> dict[str, Any]:
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


def _modules(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    parallel = config.last_stack.parallel
    norms = ("input_layernorm", "post_attention_layernorm")
    if parallel is True:
        norms = ("ln_attn", "ln_mlp")
    modules: dict[str, tuple[str, ...]] = {
        "attention_norm": norms[:1],
        "attention.qkv": ("self_attention.query_key_value",),
        "attention.output": ("self_attention.dense",),
        "feedforward.up": ("mlp.dense_h_to_4h",),
        "feedforward.down": ("mlp.dense_4h_to_h",),
    }
    return modules if parallel == "one_norm" else modules | {"feedforward_norm": norms[1:]}


FAMILIES = (
    decoder_family(
        Dialect(
            model_type="falcon", sizes=_SIZES, answers="transformer.", name="Falcon",
            fixed_heads=True, tokens={"bos": 11, "eos": 11},
            spelled={
                "rms_norm_eps": "layer_norm_epsilon", "intermediate_size": "ffn_hidden_size",
                "hidden_act": "activation", "num_key_value_heads": None,
            },
            defaults={
                "vocab_size": 65024, "hidden_size": 4544, "num_attention_heads": 71,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": True,
            },
            more={"hidden_dropout": ("dropout", 0.0), "bias": ("bias", False)},
            built_in=LAYER_NORM | {"activation": "gelu", "gated": False},
            names=Names("transformer.", "transformer.word_embeddings.weight", "transformer.h.{}.", "ln_f"),
            refused={"alibi": (False, "scores would have a bias by distance")},
            modules=_modules, order=grouped_order, read=_read, write=_write,
        )
    ),
)  # fmt: skip
