"""Marian (Junczys-Dowmunt et al. 2018), opus-mt, and BART (Lewis et al. 2020): post-norm stacks.

Both have a bias of the scores. A BART has learned positions, after two rows that no token reads,
and a norm of its embeddings.

Marian's sinusoids are in two halves, where those of the paper are interleaved: a model of ours is
exported as a Marian where both stacks have `sinusoid: halves` and the head has `bias: true`.
"""

from functools import partial
from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.interop.family import Family, Weight, affine, of_one_class, table
from pretrain.interop.fields import THEIR_ACTIVATIONS, Fields, Keys, build_config, refusal, write_keys, write_tokens

_SHARED: Keys = {
    "d_model": ("width", 1024),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.0),
}
_BART_SIZES = {"vocab_size": 50265}
_LEARNED = {"position": "learned", "position_offset": 2, "input_norm": True}
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
_WORDS = "model.shared.weight"
_COPIES = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")


def _keys_of(stack: str) -> Keys:
    return {
        f"{stack}_layers": ("layers", 12),
        f"{stack}_attention_heads": ("heads", 16),
        f"{stack}_ffn_dim": ("ff_width", 4096),
    }


def _read_config(is_bart: bool, values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
    fields = Fields(values)
    for key, (allowed, why) in (_FIXED_OF_BOTH if is_bart else _FIXED).items():
        fields.only(key, allowed, why)
    model = fields.read(_MODEL, _BART_SIZES if is_bart else {})
    if fields.optional_integer("decoder_vocab_size") not in (None, model["vocab_size"]):
        why = "must be vocab_size: the table is shared"
        raise refusal("decoder_vocab_size", values["decoder_vocab_size"], why)
    stack = fields.read(_SHARED) | {
        "activation": fields.activation("activation_function", "gelu"),
        "gated": False,
        "norm": "layer",
        "norm_eps": 1e-5,
        "norm_placement": "post",
        "bias": True,
        # The sinusoids of the paper are interleaved.
        **(_LEARNED if is_bart else {"position": "sinusoidal", "sinusoid": "halves"}),
    }
    tokens = {"pad": 1, "bos": 0, "eos": 2, "start": 2} if is_bart else {"pad": 58100, "eos": 0, "start": 58100}
    return build_config(
        **model,
        encoder=stack | fields.read(_keys_of("encoder")),
        decoder=stack | fields.read(_keys_of("decoder")),
        head=HeadConfig(bias=True),
        tied_embeddings=True,
        init_scaled=False,
        special_tokens=fields.special_tokens(**tokens),
    )


def _write_config(is_bart: bool, config: ModelConfig) -> dict[str, Any]:
    decoder = config.last_stack
    return {
        **{key: value for key, (value, _) in (_FIXED_OF_BOTH if is_bart else _FIXED).items()},
        **write_keys(config, _MODEL),
        **write_keys(config.encoder or decoder, _keys_of("encoder")),
        **write_keys(decoder, _keys_of("decoder")),
        **write_keys(decoder, _SHARED),
        **write_tokens(config.special_tokens, "start"),
        **({} if is_bart else {"decoder_vocab_size": config.vocab_size}),
        "activation_function": THEIR_ACTIVATIONS[decoder.activation],
        "forced_eos_token_id": config.special_tokens.eos,
    }


def _weights(is_bart: bool, config: ModelConfig) -> list[Weight]:
    weights = [table("embedding.weight", _WORDS, config.vocab_size)]
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack is None:
            continue
        width = stack.width
        if is_bart:
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
    return [*weights, table("head.bias", "final_logits_bias", config.vocab_size, row=True)]


MARIAN, BART = (
    Family(
        model_type=model_type,
        read_config=partial(_read_config, model_type == "bart"),
        write_config=partial(_write_config, model_type == "bart"),
        architecture=of_one_class(architecture),
        weights=partial(_weights, model_type == "bart"),
        aliases=dict.fromkeys(_COPIES, _WORDS),
        ignored=(r"model\.(encoder|decoder)\.embed_positions\..*",),
        prefix="model.",
    )
    for model_type, architecture in (("marian", "MarianMTModel"), ("bart", "BartForConditionalGeneration"))
)
