"""T5 (Raffel et al. 2020), v1.0 and v1.1: a relative position bias, no bias terms, unscaled attention.

v1.0 ties the head and divides its input by sqrt(D), v1.1 (flan-T5 too) does neither. Up to
transformers 4 both depend on `tie_word_embeddings`; 5 always writes `tie_word_embeddings: true`,
and `scale_decoder_outputs` for the division. So an untied head is recognised by its tensor. An
export uses what both versions read alike, so a head that is tied and not divided, or the other way
round, is not exported.
"""

from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.interop.family import Family, Weight, affine, table
from pretrain.interop.fields import (
    ACTIVATIONS,
    THEIR_ACTIVATIONS,
    Fields,
    Keys,
    build_config,
    refusal,
    write_keys,
    write_tokens,
)

_STACK: Keys = {
    "d_model": ("width", 512),
    "num_heads": ("heads", 8),
    "d_ff": ("ff_width", 2048),
    "layer_norm_epsilon": ("norm_eps", 1e-6),
    "relative_attention_num_buckets": ("relative_buckets", 32),
    "relative_attention_max_distance": ("relative_max_distance", 128),
    "dropout_rate": ("dropout", 0.1),
}
_MODEL: Keys = {"vocab_size": ("vocab_size", 32128), "n_positions": ("max_seq_len", 512)}
_GATED = {name: f"gated-{name}" for name in ("quick_gelu", "silu", "relu", "relu2")}
_GATED |= {"gelu": "gated-gelu_python", "gelu_tanh": "gated-gelu"}
"""Our activation -> `feed_forward_proj`; theirs reads "gated-gelu" as gated gelu_new."""
_WORDS = "shared.weight"
_HEAD = "lm_head.weight"
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", _HEAD)
_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def _read_config(values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
    fields = Fields(values)
    fields.only("is_encoder_decoder", True, "a T5 of ours has both stacks")
    scaled = fields.flag("scale_decoder_outputs", fields.flag("tie_word_embeddings", True))
    layers = fields.integer("num_layers", 6)
    stack = fields.read(_STACK)
    head_width = fields.integer("d_kv", 64)
    activation, gated = _read_projection(fields)
    stack |= {
        "head_width": None if head_width * stack["heads"] == stack["width"] else head_width,
        "activation": activation,
        "gated": gated,
        "norm": "rms",
        "scaled_attention": False,
        "position": "relative",
    }
    tokens = fields.special_tokens(pad=0, eos=1, start=None)
    if "decoder_start_token_id" not in values:
        tokens = tokens.model_copy(update={"start": tokens.pad})
    return build_config(
        **fields.read(_MODEL),
        encoder=stack | {"layers": layers},
        decoder=stack | {"layers": fields.optional_integer("num_decoder_layers", layers) or layers},
        head=HeadConfig(scaled=scaled),
        tied_embeddings=scaled or _HEAD not in names,
        init="t5",
        special_tokens=tokens,
    )


def _read_projection(fields: Fields) -> tuple[str, bool]:
    """Returns the activation of the feed-forward layers, and whether they are gated."""
    key = "feed_forward_proj"
    text = str(fields.values.get(key, "relu"))
    if text == _GATED["gelu_tanh"]:
        return "gelu_tanh", True
    name = text.removeprefix("gated-")
    if name not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise refusal(key, text, f"must be [gated-]NAME, NAME one of {known}")
    return ACTIVATIONS[name], name != text


def _write_config(config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    return {
        **write_keys(config, _MODEL),
        **write_keys(stack, _STACK),
        **write_tokens(config.special_tokens, "start"),
        "is_encoder_decoder": True,
        "d_kv": stack.per_head_width,
        "num_layers": (config.encoder or stack).layers,
        "num_decoder_layers": stack.layers,
        "feed_forward_proj": (_GATED if stack.gated else THEIR_ACTIVATIONS)[stack.activation],
        "tie_word_embeddings": config.tied_embeddings,
        # Where it is not the default; transformers 4 does not know it, and would scale.
        **({} if config.head.scaled == config.tied_embeddings else {"scale_decoder_outputs": config.head.scaled}),
    }


def _weights(config: ModelConfig) -> list[Weight]:
    weights = [table("embedding.weight", _WORDS, config.vocab_size)]
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack is None:
            continue
        width = stack.width
        inner = stack.heads * stack.per_head_width
        block = {
            "attention_norm": {"0.layer_norm": width},
            "attention.qkv": {f"0.SelfAttention.{part}": inner for part in "qkv"},
            "attention.output": {"0.SelfAttention.o": width},
        }
        if name == "decoder":
            block |= {
                "cross_norm": {"1.layer_norm": width},
                "cross.query": {"1.EncDecAttention.q": inner},
                "cross.key_value": {f"1.EncDecAttention.{part}": inner for part in "kv"},
                "cross.output": {"1.EncDecAttention.o": width},
            }
        # Sub-layers are numbered: cross attention is between attention and feed-forward.
        last = 2 if name == "decoder" else 1
        up, inputs = ("gate_up", ("wi_0", "wi_1")) if stack.gated else ("up", ("wi",))
        block |= {
            "feedforward_norm": {f"{last}.layer_norm": width},
            f"feedforward.{up}": {f"{last}.DenseReluDense.{part}": stack.ff_width for part in inputs},
            "feedforward.down": {f"{last}.DenseReluDense.wo": width},
        }
        biases = ((f"{name}.{_BIAS}", stack.relative_buckets),)
        weights.append(Weight(f"{name}.position.weight", biases))
        for number in range(stack.layers):
            theirs = f"{name}.block.{number}.layer."
            weights += affine(f"{name}.blocks.{number}.", theirs, block, bias=False)
        weights += affine(f"{name}.", f"{name}.", {"norm": {"final_layer_norm": width}}, bias=False)
    if not config.tied_embeddings:
        weights.append(table("head.weight", _HEAD, config.vocab_size))
    return weights


T5 = Family(
    model_type="t5",
    read_config=_read_config,
    write_config=_write_config,
    architecture=lambda config: "T5ForConditionalGeneration",
    weights=_weights,
    aliases=dict.fromkeys(_COPIES, _WORDS),
    # Old checkpoints have a bias of cross attention, which no model reads.
    ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
)
