"""BART (Lewis et al. 2020), PLBart (Ahmad et al. 2021) and mBART (Liu et al. 2020).

Scores have a bias. Positions are learned, after two rows that no token reads, and embeddings have
a norm. PLBart is a BART of source code; mBART has its other norms before sub-layers, and one after
the last. Texts of both begin with a token of their language: `decoder_start_token_id` may be null.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.families.config_json import Fields, Keys, refusal
from pretrain.families.family import Family, Weight, table
from pretrain.families.sizes import BOTH, Architecture, Sizes
from pretrain.families.stack_tables import StackNames, Table, table_family
from pretrain.families.unreleased import TRANSFORMER

_BART = Architecture(
    BOTH,
    TRANSFORMER.stack
    | {"activation": "gelu", "sinusoid": "halves", "position": "learned", "position_offset": 2, "input_norm": True},
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
_BART_SIZES = {
    # Lewis et al. 2020, 2.1, Ahmad et al. 2021 and Liu et al. 2020, as released.
    "bart-base": _BART.size(6, 768, 12, 3072, of=(50265, 139_470_681)),
    "bart-large": _BART.size(12, 1024, 16, 4096, of=(50265, 406_341_721)),
    "bart-tiny": _BART.size(2, 64, 4, 256, max_seq_len=128),
}
_PLBART_SIZES = {
    "plbart-base": _PLBART.size(6, 768, 12, 3072, of=(50005, 139_270_741), attention_dropout=0.1),
    "plbart-tiny": _PLBART.size(2, 64, 4, 256, max_seq_len=128),
}
_MBART_SIZES = {
    "mbart-large": _MBART.size(12, 1024, 16, 4096, of=(250027, 611_101_867)),
    "mbart-tiny": _MBART.size(2, 64, 4, 256, max_seq_len=128),
}
_KEYS: Keys = {
    "vocab_size": ("model.vocab_size", 50265),
    "max_position_embeddings": ("model.max_seq_len", 1024),
    "scale_embedding": ("model.scaled_embeddings", False),
    "init_std": ("model.init_std", 0.02),
    "d_model": ("width", 1024),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.0),
    "encoder_layers": ("encoder.layers", 12),
    "encoder_attention_heads": ("encoder.heads", 16),
    "encoder_ffn_dim": ("encoder.ff_width", 4096),
    "decoder_layers": ("decoder.layers", 12),
    "decoder_attention_heads": ("decoder.heads", 16),
    "decoder_ffn_dim": ("decoder.ff_width", 4096),
}
_PLBART_DEFAULTS = {
    "vocab_size": 50005, "d_model": 768, "attention_dropout": 0.1, "scale_embedding": True,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 6),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 12),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 3072),
}  # fmt: skip
FIXED = {
    "is_encoder_decoder": (True, "it has both stacks"),
    "tie_word_embeddings": (True, "theirs then unties the stacks' tables from each other, too"),
}
_WORDS = "model.shared.weight"
_COPIES = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
_BLOCK = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": ("self_attn.out_proj",),
    "attention_norm": ("self_attn_layer_norm",),
    "feedforward.up": ("fc1",),
    "feedforward.down": ("fc2",),
    "feedforward_norm": ("final_layer_norm",),
}
_CROSS = {
    "cross.query": ("encoder_attn.q_proj",),
    "cross.key_value": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "cross.output": ("encoder_attn.out_proj",),
    "cross_norm": ("encoder_attn_layer_norm",),
}


def _names(stack: str, values: Mapping[str, Any]) -> StackNames:
    place = f"model.{stack}."
    before, last_norm = {}, values["norm_placement"] == "pre"
    if values["position"] == "learned":
        before["position"] = f"{place}embed_positions.weight"
    if values.get("input_norm"):
        before["input_norm"] = f"{place}layernorm_embedding"
    return StackNames(
        layers=f"{place}layers.{{}}.",
        block=_BLOCK | (_CROSS if stack == "decoder" else {}),
        before=before,
        after={"norm": f"{place}layer_norm"} if last_norm else {},
    )


def _read(fields: Fields, names: frozenset[str], found: dict[str, Any]) -> dict[str, Any]:
    rows = fields.optional_integer("decoder_vocab_size")
    if rows not in (None, found["model.vocab_size"]):
        why = "must be vocab_size: the table is shared"
        raise refusal("decoder_vocab_size", rows, why)
    return {"model.head": HeadConfig(bias=True)}


def _ends(config: ModelConfig) -> list[Weight]:
    if not config.head.bias:
        return []
    bias = table("head.bias", "final_logits_bias", config.vocab_size, row=True)
    return [replace(bias, optional=True)]  # the class without a head has none


def write_pair(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of this kin that are no values."""
    return {"forced_eos_token_id": config.special_tokens.eos}


def pair_family(
    model_type: str, name: str, sizes: Sizes, stack: Mapping[str, Any], **differs: Any
) -> Family:  # fmt: skip
    """Builds a family of this kin; `stack` are values of both stacks that no key changes."""
    built_in = {"gated": False, "norm": "layer", "norm_eps": 1e-5, "bias": True, **stack}
    built_in |= {"model.tied_embeddings": True, "model.init_scaled": False}
    usual: dict[str, Any] = {"scorer": "ForConditionalGeneration", "fixed": FIXED, "write": write_pair}
    made = Table(
        model_type=model_type, name=name, keys=_KEYS, activation=("activation_function", "gelu"),
        roles=("start",), built_in=built_in, read=_read, words=_WORDS,
        stacks={one: _names(one, stack) for one in BOTH}, ends=_ends,
        **(usual | differs),
    )  # fmt: skip
    ignored = (r"model\.(encoder|decoder)\.embed_positions\..*",)
    aliases = dict.fromkeys(_COPIES, _WORDS)
    return table_family(made, aliases=aliases, ignored=ignored, prefix="model.", sizes=sizes)


_POSITIONED = {"position": "learned", "position_offset": 2}
_POST = _POSITIONED | {"input_norm": True, "norm_placement": "post"}
_PRE = _POSITIONED | {"input_norm": "both", "norm_placement": "pre"}
_TOKENS = {"pad": 1, "bos": 0, "eos": 2}
_STARTED = {"tokens": _TOKENS | {"start": 2}}
_BY_LANGUAGE = {"tokens": _TOKENS | {"start": None}}
FAMILIES = (
    pair_family("bart", "Bart", _BART_SIZES, _POST, **_STARTED),
    pair_family("plbart", "PLBart", _PLBART_SIZES, _POST, defaults=_PLBART_DEFAULTS, **_BY_LANGUAGE),
    pair_family("mbart", "MBart", _MBART_SIZES, _PRE, **_BY_LANGUAGE),
)
