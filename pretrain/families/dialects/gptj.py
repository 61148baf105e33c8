"""GPT-J (Wang and Komatsuzaki 2021): both sub-layers read one norm; the head has a bias.

Neighbouring dimensions of a part of each head are rotated, which here are a half apart.
"""

from typing import Any

from pretrain.config.model import ModelConfig
from pretrain.families.config_json import Fields, refusal
from pretrain.families.decoders.gpt_neox import LAYER_NORM, NEOX
from pretrain.families.dialect import Dialect, Names, decoder_family
from pretrain.families.rotary_keys import RopeKeys, halves_order
from pretrain.families.sizes import Architecture

_BUILT_IN = LAYER_NORM | {
    "activation": "gelu_tanh", "gated": False, "bias": True, "qkv_bias": False, "output_bias": False,
    "parallel": "one_norm",
}  # fmt: skip
_GPTJ = Architecture(
    ("decoder",),
    NEOX.stack | _BUILT_IN,
    {"max_seq_len": 2048, "tied_embeddings": False, "head": {"bias": True}},
)
_SIZES = {
    # Wang and Komatsuzaki 2021, as released.
    "gptj-6b": _GPTJ.size(28, 4096, 16, 16384, of=(50400, 6_050_882_784)),
    "gptj-tiny": _GPTJ.size(2, 64, 4, 256, max_seq_len=128, rope_fraction=0.5),
}
_MODULES = {
    "attention_norm": ("ln_1",),
    "attention.qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    "attention.output": ("attn.out_proj",),
    "feedforward.up": ("mlp.fc_in",),
    "feedforward.down": ("mlp.fc_out",),
}


def _read(fields: Fields) -> dict[str, Any]:
    width, heads = fields.integer("n_embd", 4096), fields.integer("n_head", 16)
    if fields.values.get("n_inner") is None:
        fields.values["n_inner"] = 4 * width
    head_width = width // max(heads, 1)
    rotated = fields.optional_integer("rotary_dim", 64)
    if rotated is None or not 0 < rotated <= head_width:
        raise refusal("rotary_dim", rotated, f"must be 1 to {head_width}, the width of a head")
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):  # theirs reads none of them
        fields.values.pop(key, None)
    fields.values["partial_rotary_factor"] = rotated / head_width
    return {"head.bias": True}


def _write(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    keys: dict[str, Any] = {"rotary_dim": stack.rotary_width, "embd_pdrop": stack.dropout}
    # The tanh approximation has two names in transformers, and a GPT-J is released with this one.
    return keys | ({"activation_function": "gelu_new"} if stack.activation == "gelu_tanh" else {})


FAMILIES = (
    decoder_family(
        Dialect(
            model_type="gptj", name="GPTJ", sizes=_SIZES, answers="transformer.", fixed_heads=True,
            tokens={"bos": 50256, "eos": 50256}, built_in=_BUILT_IN, order=halves_order,
            rope=RopeKeys(share=1.0), modules=lambda config: _MODULES, read=_read, write=_write,
            names=Names("transformer.", "transformer.wte.weight", "transformer.h.{}.", "ln_f"),
            spelled={
                "vocab_size": "vocab_size", "max_position_embeddings": "n_positions",
                "num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head",
                "intermediate_size": "n_inner", "rms_norm_eps": "layer_norm_epsilon",
                "attention_dropout": "attn_pdrop", "hidden_act": "activation_function",
                "num_key_value_heads": None,
            },
            more={"resid_pdrop": ("dropout", 0.0)},
            defaults={
                "vocab_size": 50400, "num_hidden_layers": 28, "num_attention_heads": 16,
                "rms_norm_eps": 1e-5,
            },
            ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
        )
    ),
)  # fmt: skip
