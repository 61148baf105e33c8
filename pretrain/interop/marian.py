"""Marian (Junczys-Dowmunt et al. 2018), the opus-mt translators: the Transformer of 2017 with a bias of the scores.

Its sinusoids lie in two halves, where those of the paper are interleaved: a model of ours is exchanged as a Marian
where both stacks say `sinusoid: halves` and the head says `bias: true`.
"""

from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig, StackConfig
from pretrain.interop.family import Family, Weight, affine
from pretrain.interop.fields import THEIR_ACTIVATIONS, Fields, build_config, refusal

_WORDS = "model.shared.weight"


def _read_config(values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
    fields = Fields(values)
    fields.only("is_encoder_decoder", True, "a Marian of ours has both stacks")
    fields.only("share_encoder_decoder_embeddings", True, "our stacks have one table of embeddings and one vocabulary")
    fields.only("tie_word_embeddings", True, "theirs then unties the stacks' tables from each other, too")
    fields.only("normalize_before", False, "the released code has its norms after the residual sums whatever this says")
    fields.only("normalize_embedding", False, "the released code has no norm over its embeddings")
    fields.only("add_final_layer_norm", False, "the released code has no norm after the last layer")
    fields.only("static_position_embeddings", True, "positions are sinusoids here")
    vocab_size = fields.integer("vocab_size", 58101)
    if (fields.optional_integer("decoder_vocab_size") or vocab_size) != vocab_size:
        raise refusal("decoder_vocab_size", values["decoder_vocab_size"], "must be vocab_size: the table is shared")
    tokens = fields.special_tokens(start="decoder_start_token_id", pad=58100, eos=0)
    if "decoder_start_token_id" not in values:
        tokens = tokens.model_copy(update={"start": 58100})
    return build_config(
        encoder=_read_stack(fields, "encoder"),
        decoder=_read_stack(fields, "decoder"),
        head=HeadConfig(bias=True),
        vocab_size=vocab_size,
        max_seq_len=fields.integer("max_position_embeddings", 1024),
        tied_embeddings=True,
        scaled_embeddings=fields.flag("scale_embedding", False),
        init_std=fields.number("init_std", 0.02),
        init_scaled=False,
        special_tokens=tokens,
    )


def _read_stack(fields: Fields, name: str) -> dict[str, Any]:
    return {
        "layers": fields.integer(f"{name}_layers", 12),
        "width": fields.integer("d_model", 1024),
        "heads": fields.integer(f"{name}_attention_heads", 16),
        "ff_width": fields.integer(f"{name}_ffn_dim", 4096),
        "activation": fields.activation("activation_function", "gelu"),
        "gated": False,
        "norm": "layer",
        "norm_eps": 1e-5,
        "norm_placement": "post",
        "bias": True,
        "position": "sinusoidal",
        "sinusoid": "halves",
        "dropout": fields.number("dropout", 0.1),
        "attention_dropout": fields.number("attention_dropout", 0.0),
    }


def _write_config(config: ModelConfig) -> dict[str, Any]:
    decoder, tokens = config.last_stack, config.special_tokens
    encoder = config.encoder or decoder
    return {
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "decoder_vocab_size": config.vocab_size,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
        "d_model": decoder.width,
        "encoder_layers": encoder.layers,
        "encoder_attention_heads": encoder.heads,
        "encoder_ffn_dim": encoder.ff_width,
        "decoder_layers": decoder.layers,
        "decoder_attention_heads": decoder.heads,
        "decoder_ffn_dim": decoder.ff_width,
        "activation_function": THEIR_ACTIVATIONS[decoder.activation],
        "max_position_embeddings": config.max_seq_len,
        "static_position_embeddings": True,
        "normalize_before": False,
        "normalize_embedding": False,
        "scale_embedding": config.scaled_embeddings,
        "dropout": decoder.dropout,
        "attention_dropout": decoder.attention_weight_dropout,
        "init_std": config.init_std,
        "pad_token_id": tokens.pad,
        "bos_token_id": tokens.bos,
        "eos_token_id": tokens.eos,
        "forced_eos_token_id": tokens.eos,
        "decoder_start_token_id": tokens.start,
    }


def _weights(config: ModelConfig) -> list[Weight]:
    assert config.vocab_size is not None
    weights = [Weight("embedding.weight", ((_WORDS, config.vocab_size),), vocab=True)]
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack is not None:
            weights += [weight for number in range(stack.layers) for weight in _block_weights(name, stack, number)]
    return [*weights, Weight("head.bias", (("final_logits_bias", config.vocab_size),), vocab=True, row=True)]


def _block_weights(name: str, stack: StackConfig, number: int) -> list[Weight]:
    ours, theirs, width = f"{name}.blocks.{number}", f"model.{name}.layers.{number}", stack.width
    parts = [(f"{theirs}.self_attn.{part}_proj", width) for part in "qkv"]
    weights = [
        *affine(f"{ours}.attention.qkv", *parts, bias=True),
        *affine(f"{ours}.attention.output", (f"{theirs}.self_attn.out_proj", width), bias=True),
        *affine(f"{ours}.attention_norm", (f"{theirs}.self_attn_layer_norm", width), bias=True),
        *affine(f"{ours}.feedforward.up", (f"{theirs}.fc1", stack.ff_width), bias=True),
        *affine(f"{ours}.feedforward.down", (f"{theirs}.fc2", width), bias=True),
        *affine(f"{ours}.feedforward_norm", (f"{theirs}.final_layer_norm", width), bias=True),
    ]
    if name == "decoder":
        cross = f"{theirs}.encoder_attn"
        key_value = [(f"{cross}.{part}_proj", width) for part in "kv"]
        weights += affine(f"{ours}.cross.query", (f"{cross}.q_proj", width), bias=True)
        weights += affine(f"{ours}.cross.key_value", *key_value, bias=True)
        weights += affine(f"{ours}.cross.output", (f"{cross}.out_proj", width), bias=True)
        weights += affine(f"{ours}.cross_norm", (f"{theirs}.encoder_attn_layer_norm", width), bias=True)
    return weights


def _aliases(config: ModelConfig) -> dict[str, str]:
    copies = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    return dict.fromkeys(copies, _WORDS)


MARIAN = Family(
    model_type="marian",
    read_config=_read_config,
    write_config=_write_config,
    architecture=lambda config: "MarianMTModel",
    weights=_weights,
    aliases=_aliases,
    ignored=(r"model\.(encoder|decoder)\.embed_positions\..*",),
    prefix="model.",
)
