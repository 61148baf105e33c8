"""Marian (Junczys-Dowmunt et al. 2018), opus-mt, BART (Lewis et al. 2020), PLBart and mBART.

All have a bias of the scores. BART and its kin have learned positions, after two rows that no token
reads, and a norm of their embeddings. PLBart (Ahmad et al. 2021) is a BART of source code; mBART
(Liu et al. 2020) has its other norms before sub-layers, and one after the last. Texts of both begin
with a token of their language: `decoder_start_token_id` may be null.

Marian's sinusoids are in two halves, where those of the paper are interleaved: a model of ours is
exported as a Marian where both stacks have `sinusoid: halves` and the head has `bias: true`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.families.config_json import (
    THEIR_ACTIVATIONS,
    Fields,
    Keys,
    build_config,
    refusal,
    write_keys,
    write_tokens,
)
from pretrain.families.family import Family, Weight, affine, of_two_stacks, table
from pretrain.families.sizes import BOTH, Architecture
from pretrain.families.unreleased import TRANSFORMER

_MARIAN = Architecture(
    BOTH,
    TRANSFORMER.stack | {"activation": "silu", "sinusoid": "halves"},
    TRANSFORMER.ends | {"head": {"bias": True}, "max_seq_len": 512},
)
"""Junczys-Dowmunt et al. 2018, as trained for OPUS-MT (Tiedemann and Thottingal 2020)."""
_BART = Architecture(
    BOTH,
    _MARIAN.stack | {"activation": "gelu", "position": "learned", "position_offset": 2, "input_norm": True},
    {"head": {"bias": True}, "max_seq_len": 1024, "tied_embeddings": True, "init_scaled": False},
)
"""Lewis et al. 2020, 2.1, as released."""
_PLBART = _BART._replace(ends=_BART.ends | {"scaled_embeddings": True, "family": "plbart"})
"""Ahmad et al. 2021, as released: a BART of source code."""
_MBART = Architecture(
    BOTH,
    _BART.stack | {"norm_placement": "pre", "input_norm": "both"},
    _BART.ends | {"scaled_embeddings": True},
)
"""Liu et al. 2020, 2.2, as released."""
_SIZES_OF = {
    "marian": {
        "marian-base": _MARIAN.size(6, 512, 8, 2048, of=(80035, 85_196_451)),
        "marian-tiny": _MARIAN.size(2, 64, 4, 256, max_seq_len=128),
    },
    # Lewis et al. 2020, 2.1, Ahmad et al. 2021 and Liu et al. 2020, as released.
    "bart": {
        "bart-base": _BART.size(6, 768, 12, 3072, of=(50265, 139_470_681)),
        "bart-large": _BART.size(12, 1024, 16, 4096, of=(50265, 406_341_721)),
        "bart-tiny": _BART.size(2, 64, 4, 256, max_seq_len=128),
    },
    "plbart": {
        "plbart-base": _PLBART.size(
            6, 768, 12, 3072, of=(50005, 139_270_741), attention_dropout=0.1
        ),
        "plbart-tiny": _PLBART.size(2, 64, 4, 256, max_seq_len=128),
    },
    "mbart": {
        "mbart-large": _MBART.size(12, 1024, 16, 4096, of=(250027, 611_101_867)),
        "mbart-tiny": _MBART.size(2, 64, 4, 256, max_seq_len=128),
    },
}  # fmt: skip
_SHARED: Keys = {
    "d_model": ("width", 1024),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.0),
}
_MODEL: Keys = {
    "vocab_size": ("vocab_size", 58101),
    "max_position_embeddings": ("max_seq_len", 1024),
    "scale_embedding": ("scaled_embeddings", False),
    "init_std": ("init_std", 0.02),
}
_FIXED_OF_BOTH = {
    "is_encoder_decoder": (True, "it has both stacks"),
    "tie_word_embeddings": (True, "theirs then unties the stacks' tables from each other, too"),
}
_FIXED = _FIXED_OF_BOTH | {
    "share_encoder_decoder_embeddings": (True, "our stacks share one table and one vocabulary"),
    "normalize_before": (False, "the released code always has its norms after the residual sums"),
    "normalize_embedding": (False, "the released code has no norm over its embeddings"),
    "add_final_layer_norm": (False, "the released code has no norm after the last layer"),
    "static_position_embeddings": (True, "positions are sinusoids here"),
}
_POSITIONED = {"position": "learned", "position_offset": 2}
_POSITIONED |= {"input_norm": True, "norm_placement": "post"}
_PLBART_SIZES = {"vocab_size": 50005, "d_model": 768, "attention_dropout": 0.1}
_PLBART_SIZES |= {"scale_embedding": True}
for _name, _size in (("layers", 6), ("attention_heads", 12), ("ffn_dim", 3072)):
    _PLBART_SIZES |= {f"encoder_{_name}": _size, f"decoder_{_name}": _size}


@dataclass(frozen=True, slots=True)
class _Kind:
    """One `model_type`.

    Attributes:
        name: Prefix of the class names.
        stack: Values of both stacks that no key changes.
        tokens: Ids of special tokens, by default.
        fixed: Keys with their only values, and the meaning of others.
        sizes: Defaults by key, where they are not those of Marian.
        head: Rest of the name of the class with a head.
    """

    name: str
    stack: Mapping[str, Any]
    tokens: Mapping[str, int | None]
    fixed: Mapping[str, tuple[bool, str]]
    sizes: Mapping[str, Any]
    head: str = "ForConditionalGeneration"


_KINDS = {
    "marian": _Kind(
        "Marian",
        # The sinusoids of the paper are interleaved.
        {"position": "sinusoidal", "sinusoid": "halves", "norm_placement": "post"},
        {"pad": 58100, "eos": 0, "start": 58100},
        _FIXED,
        {},
        "MTModel",
    ),
    "bart": _Kind(
        "Bart",
        _POSITIONED,
        {"pad": 1, "bos": 0, "eos": 2, "start": 2},
        _FIXED_OF_BOTH,
        {"vocab_size": 50265},
    ),
    "plbart": _Kind(
        "PLBart",
        _POSITIONED,
        {"pad": 1, "bos": 0, "eos": 2, "start": None},
        _FIXED_OF_BOTH,
        _PLBART_SIZES,
    ),
    "mbart": _Kind(
        "MBart",
        _POSITIONED | {"input_norm": "both", "norm_placement": "pre"},
        {"pad": 1, "bos": 0, "eos": 2, "start": None},
        _FIXED_OF_BOTH,
        {"vocab_size": 50265},
    ),
}
_WORDS = "model.shared.weight"
_COPIES = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")


def _keys_of(stack: str) -> Keys:
    return {
        f"{stack}_layers": ("layers", 12),
        f"{stack}_attention_heads": ("heads", 16),
        f"{stack}_ffn_dim": ("ff_width", 4096),
    }


def _read_config(model_type: str, values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
    fields, kind = Fields(values), _KINDS[model_type]
    for key, (allowed, why) in kind.fixed.items():
        fields.only(key, allowed, why)
    model = fields.read(_MODEL, kind.sizes)
    if fields.optional_integer("decoder_vocab_size") not in (None, model["vocab_size"]):
        why = "must be vocab_size: the table is shared"
        raise refusal("decoder_vocab_size", values["decoder_vocab_size"], why)
    stack = fields.read(_SHARED, kind.sizes) | {
        "activation": fields.activation("activation_function", "gelu"),
        "gated": False,
        "norm": "layer",
        "norm_eps": 1e-5,
        "bias": True,
        **kind.stack,
    }
    return build_config(
        **model,
        encoder=stack | fields.read(_keys_of("encoder"), kind.sizes),
        decoder=stack | fields.read(_keys_of("decoder"), kind.sizes),
        head=HeadConfig(bias=True),
        tied_embeddings=True,
        init_scaled=False,
        special_tokens=fields.special_tokens(**kind.tokens),
    )


def _write_config(model_type: str, config: ModelConfig) -> dict[str, Any]:
    decoder = config.last_stack
    return {
        **{key: value for key, (value, _) in _KINDS[model_type].fixed.items()},
        **write_keys(config, _MODEL),
        **write_keys(config.encoder or decoder, _keys_of("encoder")),
        **write_keys(decoder, _keys_of("decoder")),
        **write_keys(decoder, _SHARED),
        **write_tokens(config.special_tokens, "start"),
        **({"decoder_vocab_size": config.vocab_size} if model_type == "marian" else {}),
        "activation_function": THEIR_ACTIVATIONS[decoder.activation],
        "forced_eos_token_id": config.special_tokens.eos,
    }


def _weights(model_type: str, config: ModelConfig) -> list[Weight]:
    has_final_norm = _KINDS[model_type].stack["norm_placement"] == "pre"
    weights = [table("embedding.weight", _WORDS, config.vocab_size)]
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack is None:
            continue
        width = stack.width
        if model_type != "marian":
            rows = config.first_position(name) + config.max_seq_len
            positions = ((f"model.{name}.embed_positions.weight", rows),)
            weights.append(Weight(f"{name}.position.weight", positions))
            norm = {"input_norm": {"layernorm_embedding": width}}
            weights += affine(f"{name}.", f"model.{name}.", norm, bias=True)
        block = {
            "attention.qkv": {f"self_attn.{part}_proj": width for part in "qkv"},
            "attention.output": {"self_attn.out_proj": width},
            "attention_norm": {"self_attn_layer_norm": width},
            "feedforward.up": {"fc1": stack.ff_width},
            "feedforward.down": {"fc2": width},
            "feedforward_norm": {"final_layer_norm": width},
        }
        if name == "decoder":
            block |= {
                "cross.query": {"encoder_attn.q_proj": width},
                "cross.key_value": {f"encoder_attn.{part}_proj": width for part in "kv"},
                "cross.output": {"encoder_attn.out_proj": width},
                "cross_norm": {"encoder_attn_layer_norm": width},
            }
        for number in range(stack.layers):
            theirs = f"model.{name}.layers.{number}."
            weights += affine(f"{name}.blocks.{number}.", theirs, block, bias=True)
        if has_final_norm:
            norm = {"norm": {"layer_norm": width}}
            weights += affine(f"{name}.", f"model.{name}.", norm, bias=True)
    if config.head.bias:
        bias = table("head.bias", "final_logits_bias", config.vocab_size, row=True)
        weights.append(replace(bias, optional=True))  # the class without a head has none
    return weights


FAMILIES = tuple(
    Family(
        model_type=model_type,
        read_config=partial(_read_config, model_type),
        write_config=partial(_write_config, model_type),
        architecture=of_two_stacks(kind.name, kind.head),
        weights=partial(_weights, model_type),
        aliases=dict.fromkeys(_COPIES, _WORDS),
        ignored=(r"model\.(encoder|decoder)\.embed_positions\..*",),
        prefix="model.",
        sizes=_SIZES_OF[model_type],
    )
    for model_type, kind in _KINDS.items()
)
