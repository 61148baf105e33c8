"""LFM 2 (Liquid AI 2025): short gated convolutions, and some layers of attention."""

from typing import Any

from pretrain.config.model import ModelConfig, StackConfig
from pretrain.families.config_json import Fields
from pretrain.families.decoders.llama import LLAMA_STACK
from pretrain.families.dialect import Dialect, Names, decoder_family
from pretrain.families.family import Weight
from pretrain.families.mixer_keys import MixerTensors, filter_weight, read_mixers, write_mixers
from pretrain.families.rotary_keys import FULL
from pretrain.families.sizes import Architecture

_LFM2 = Architecture(
    ("decoder",),
    LLAMA_STACK | {"qk_norm": True, "rope_theta": 1000000.0, "norm_eps": 1e-5},
    {"max_seq_len": 128000, "tied_embeddings": True},
)
"""Liquid AI 2025 (LFM 2), as released."""
_KINDS = {"conv": "convolution"}


def _mixers(layers: int, attention: tuple[int, ...]) -> list[str]:
    return ["attention" if number in attention else "convolution" for number in range(layers)]


_SIZES = {
    "lfm2-350m": _LFM2.size(
        16, 1024, 16, 4608, of=(65536, 354_483_968), kv_heads=8,
        mixers=_mixers(16, (2, 5, 8, 10, 12, 14)),
    ),
    "lfm2-1.2b": _LFM2.size(
        16, 2048, 32, 8192, of=(65536, 1_170_340_608), kv_heads=8,
        mixers=_mixers(16, (2, 5, 8, 10, 12, 14)),
    ),
    "lfm2-tiny": _LFM2.size(
        3, 64, 4, 192, max_seq_len=128, kv_heads=2, mixers=_mixers(3, (1,)),
    ),
}  # fmt: skip
_MODULES = {
    "attention_norm": ("operator_norm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.query_norm": ("self_attn.q_layernorm",),
    "attention.key_norm": ("self_attn.k_layernorm",),
    "attention.output": ("self_attn.out_proj",),
    "feedforward_norm": ("ffn_norm",),
    "feedforward.gate_up": ("feed_forward.w1", "feed_forward.w3"),
    "feedforward.down": ("feed_forward.w2",),
}


def _read(fields: Fields) -> dict[str, Any]:
    layers = fields.integer("num_hidden_layers", 32)
    listed = fields.values.get("full_attn_idxs")
    attention = range(layers) if listed is None else listed
    usual = [FULL if number in attention else "conv" for number in range(layers)]
    width = fields.integer("block_ff_dim", fields.integer("intermediate_size", 12288))
    if fields.flag("block_auto_adjust_ff_dim", True):
        # As theirs: two thirds, times a factor, rounded up.
        width = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        multiple = max(fields.integer("block_multiple_of", 256), 1)
        width = multiple * -(-width // multiple)
    mixers = read_mixers(fields, usual, _KINDS)
    values: dict[str, Any] = {"mixers": mixers, "ff_width": width}
    if "tie_embedding" in fields.values:
        values["model.tied_embeddings"] = fields.flag("tie_embedding", True)
    convolution = {"kernel": fields.integer("conv_L_cache", 3)}
    if any(mixer != "attention" for mixer in mixers):
        values["convolution"] = convolution | {"bias": fields.flag("conv_bias", False)}
    return values


def _write(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    return {
        "layer_types": write_mixers(stack, _KINDS),
        "intermediate_size": stack.ff_width,
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": stack.convolution.kernel,
        "conv_bias": stack.convolution.bias,
    }


def _weights(stack: StackConfig) -> list[Weight]:
    sizes, width = stack.convolution, stack.width
    parts = {"input": ("in_proj", 3 * width), "output": ("out_proj", width)}
    kinds = ["weight", "bias"][: 1 + sizes.bias]
    weights = [
        Weight(f"attention.{ours}.{kind}", ((f"conv.{theirs}.{kind}", rows),))
        for ours, (theirs, rows) in parts.items()
        for kind in kinds
    ]
    if sizes.bias:
        weights.append(Weight("attention.convolution.bias", (("conv.conv.bias", width),)))
    return [*weights, filter_weight("conv.conv", width, sizes.kernel)]


FAMILIES = (
    decoder_family(
        Dialect(
            model_type="lfm2", name="Lfm2", sizes=_SIZES, labels=False, fixed_heads=True, kv_heads=8,
            names=Names(norm="embedding_norm"), tokens={"pad": 0, "bos": 1, "eos": 2},
            spelled={"rms_norm_eps": "norm_eps", "attention_dropout": None, "hidden_act": None},
            defaults={
                "vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288,
                "max_position_embeddings": 128000, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
            },
            missing={"rope_theta": 1000000.0}, built_in={"qk_norm": True},
            read=_read, write=_write, modules=lambda config: _MODULES,
            mixers={"convolution": MixerTensors(_weights)},
        )
    ),
)  # fmt: skip
