"""T5 (Raffel et al. 2020), v1.0 and v1.1: one bias by relative distance a stack, no bias terms, unscaled attention.

v1.0 ties the head and divides what it reads by sqrt(D), v1.1 (flan-T5 too) does neither. Up to transformers 4 both hang
on `tie_word_embeddings`; 5 writes `tie_word_embeddings: true` whatever the weights are, and `scale_decoder_outputs` for
the division. So whether there is a head of its own is read from the tensors. What is written is what both versions read
alike, so a head that is tied and not divided, or the other way round, is not exported.
"""

from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig, StackConfig
from pretrain.interop.family import Family, Weight, affine
from pretrain.interop.fields import ACTIVATIONS, THEIR_ACTIVATIONS, Fields, build_config, refusal

_GATED = {"gelu": "gated-gelu_python", "gelu_tanh": "gated-gelu", "silu": "gated-silu", "relu": "gated-relu"}
"""Our activation -> `feed_forward_proj`; theirs reads "gated-gelu" as gated gelu_new."""
_WORDS, _HEAD = "shared.weight", "lm_head.weight"
_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def _read_config(values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
    fields = Fields(values)
    fields.only("is_encoder_decoder", True, "a T5 of ours has both stacks")
    scaled = fields.flag("scale_decoder_outputs", fields.flag("tie_word_embeddings", True))
    layers, start = fields.integer("num_layers", 6), "decoder_start_token_id"
    tokens = fields.special_tokens(start=start, pad=0, eos=1)
    if start not in values:
        tokens = tokens.model_copy(update={"start": tokens.pad})
    stack = _read_stack(fields)
    return build_config(
        encoder=stack | {"layers": layers},
        decoder=stack | {"layers": fields.optional_integer("num_decoder_layers", layers) or layers},
        head=HeadConfig(scaled=scaled),
        vocab_size=fields.integer("vocab_size", 32128),
        max_seq_len=fields.integer("n_positions", 512),
        tied_embeddings=scaled or _HEAD not in names,
        init="t5",
        special_tokens=tokens,
    )


def _read_stack(fields: Fields) -> dict[str, Any]:
    width, heads = fields.integer("d_model", 512), fields.integer("num_heads", 8)
    head_width = fields.integer("d_kv", 64)
    activation, gated = _read_projection(fields)
    return {
        "width": width,
        "heads": heads,
        "head_width": None if head_width * heads == width else head_width,
        "ff_width": fields.integer("d_ff", 2048),
        "activation": activation,
        "gated": gated,
        "norm": "rms",
        "norm_eps": fields.number("layer_norm_epsilon", 1e-6),
        "scaled_attention": False,
        "position": "relative",
        "relative_buckets": fields.integer("relative_attention_num_buckets", 32),
        "relative_max_distance": fields.integer("relative_attention_max_distance", 128),
        "dropout": fields.number("dropout_rate", 0.1),
    }


def _read_projection(fields: Fields) -> tuple[str, bool]:
    """Returns the activation of the feed-forward layers, and whether they are gated."""
    key = "feed_forward_proj"
    text = str(fields.values.get(key, "relu"))
    if text == _GATED["gelu_tanh"]:
        return "gelu_tanh", True
    name = text.removeprefix("gated-")
    if name not in ACTIVATIONS:
        raise refusal(key, text, f"must be [gated-]NAME, NAME one of {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name], name != text


def _write_config(config: ModelConfig) -> dict[str, Any]:
    stack, tokens = config.last_stack, config.special_tokens
    encoder = config.encoder or stack
    return {
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "d_model": stack.width,
        "d_kv": stack.per_head_width,
        "d_ff": stack.ff_width,
        "num_layers": encoder.layers,
        "num_decoder_layers": stack.layers,
        "num_heads": stack.heads,
        "n_positions": config.max_seq_len,
        "relative_attention_num_buckets": stack.relative_buckets,
        "relative_attention_max_distance": stack.relative_max_distance,
        "dropout_rate": stack.dropout,
        "layer_norm_epsilon": stack.norm_eps,
        "feed_forward_proj": (_GATED if stack.gated else THEIR_ACTIVATIONS)[stack.activation],
        "tie_word_embeddings": config.tied_embeddings,
        "pad_token_id": tokens.pad,
        "bos_token_id": tokens.bos,
        "eos_token_id": tokens.eos,
        "decoder_start_token_id": tokens.start,
    }


def _weights(config: ModelConfig) -> list[Weight]:
    assert config.vocab_size is not None
    weights = [Weight("embedding.weight", ((_WORDS, config.vocab_size),), vocab=True)]
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack is not None:
            weights += _stack_weights(name, stack, crosses=name == "decoder")
    if not config.tied_embeddings:
        weights.append(Weight("head.weight", ((_HEAD, config.vocab_size),), vocab=True))
    return weights


def _stack_weights(name: str, stack: StackConfig, *, crosses: bool) -> list[Weight]:
    width, inner = stack.width, stack.heads * stack.per_head_width
    weights = [Weight(f"{name}.position.weight", ((f"{name}.{_BIAS}", stack.relative_buckets),))]
    for number in range(stack.layers):
        ours, theirs = f"{name}.blocks.{number}", f"{name}.block.{number}.layer"
        parts = [(f"{theirs}.0.SelfAttention.{part}", inner) for part in "qkv"]
        weights += affine(f"{ours}.attention_norm", (f"{theirs}.0.layer_norm", width), bias=False)
        weights += affine(f"{ours}.attention.qkv", *parts, bias=False)
        weights += affine(f"{ours}.attention.output", (f"{theirs}.0.SelfAttention.o", width), bias=False)
        if crosses:
            cross = f"{theirs}.1.EncDecAttention"
            weights += affine(f"{ours}.cross_norm", (f"{theirs}.1.layer_norm", width), bias=False)
            weights += affine(f"{ours}.cross.query", (f"{cross}.q", inner), bias=False)
            weights += affine(f"{ours}.cross.key_value", (f"{cross}.k", inner), (f"{cross}.v", inner), bias=False)
            weights += affine(f"{ours}.cross.output", (f"{cross}.o", width), bias=False)
        last = f"{theirs}.{2 if crosses else 1}"
        weights += affine(f"{ours}.feedforward_norm", (f"{last}.layer_norm", width), bias=False)
        inputs = [(f"{last}.DenseReluDense.{part}", stack.ff_width) for part in ("wi_0", "wi_1")]
        if stack.gated:
            weights += affine(f"{ours}.feedforward.gate_up", *inputs, bias=False)
        else:
            weights += affine(f"{ours}.feedforward.up", (f"{last}.DenseReluDense.wi", stack.ff_width), bias=False)
        weights += affine(f"{ours}.feedforward.down", (f"{last}.DenseReluDense.wo", width), bias=False)
    return weights + affine(f"{name}.norm", (f"{name}.final_layer_norm", width), bias=False)


def _aliases(config: ModelConfig) -> dict[str, str]:
    aliases = {f"{name}.embed_tokens.weight": _WORDS for name in ("encoder", "decoder")}
    return aliases | ({_HEAD: _WORDS} if config.tied_embeddings else {})


T5 = Family(
    model_type="t5",
    read_config=_read_config,
    write_config=_write_config,
    architecture=lambda config: "T5ForConditionalGeneration",
    weights=_weights,
    aliases=_aliases,
    # Old checkpoints have a bias of cross attention, which no model reads.
    ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
)
