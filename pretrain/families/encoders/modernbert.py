"""ModernBERT (Warner et al. 2024): a pre-norm encoder with rotary positions and sliding windows.

Theirs counts a window over both sides: `local_attention` 128 sees 64 positions to the left and 64
to the right, which are the fewer than 65 positions away of our `window`.
"""

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
from pretrain.families.family import Family, Weight, affine, table
from pretrain.families.label_names import TEXTS, WORDS, find_unit, read_label_head, score_weights, write_label_names
from pretrain.families.sizes import Architecture

_MODERNBERT = Architecture(
    ("encoder",),
    {
        "activation": "gelu",
        "gated": True,
        "norm": "layer",
        "norm_eps": 1e-5,
        "input_norm": True,
        "bias": False,
        "position": "rotary",
        "rope_theta": 160000.0,
        "rope_local_theta": 10000.0,
        "global_every": 3,
        "window": 65,  # local attention of 128 tokens, 64 on each side
    },
    {"head": {"transform": True, "bias": True}, "max_seq_len": 8192, "tied_embeddings": True},
)
"""Warner et al. 2024, 2.1; thetas as released, after the extension to 8192 tokens."""
_SIZES = {
    # Warner et al. 2024, 2.1.3.
    "modernbert-base": _MODERNBERT.size(22, 768, 12, 1152, of=(50368, 149_655_232)),
    "modernbert-large": _MODERNBERT.size(28, 1024, 16, 2624, of=(50368, 395_881_664)),
    "modernbert-tiny": _MODERNBERT.size(4, 64, 4, 96, window=9, max_seq_len=128),
}
_STACK: Keys = {
    "num_hidden_layers": ("layers", 22),
    "hidden_size": ("width", 768),
    "num_attention_heads": ("heads", 12),
    "intermediate_size": ("ff_width", 1152),
    "norm_eps": ("norm_eps", 1e-5),
    "norm_bias": ("bias", False),
    "mlp_dropout": ("dropout", 0.0),
    "attention_dropout": ("attention_dropout", 0.0),
}
_MODEL: Keys = {
    "vocab_size": ("vocab_size", 50368),
    "max_position_embeddings": ("max_seq_len", 8192),
    "initializer_range": ("init_std", 0.02),
}
_BIASES = ("attention_bias", "mlp_bias")
_WORDS = "model.embeddings.tok_embeddings.weight"
_FULL, _SLIDING = "full_attention", "sliding_attention"


def _read_config(values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
    fields = Fields(values)
    labelled = find_unit(fields, names, "ModernBert", {TEXTS: ("classifier.weight",), WORDS: ()})
    masked = not labelled and ("head.dense.weight" in names or fields.claims("ModernBertForMaskedLM"))
    transform = masked or labelled is not None
    stack = fields.read(_STACK)
    activation = fields.activation("hidden_activation", "gelu")
    bias = stack["bias"]
    for key in (*_BIASES, "classifier_bias") if transform else _BIASES:
        why = f"a stack of ours has all its biases or none, and norm_bias is {bias}"
        fields.only(key, bias, why, missing=False)
    if transform and fields.activation("classifier_activation", "gelu") != activation:
        given = values.get("classifier_activation")
        raise refusal("classifier_activation", given, "must be hidden_activation")
    head = HeadConfig(kind="none")
    if labelled:
        mean = labelled == TEXTS and _pools_mean(fields)
        head = read_label_head(fields, dropout=0.0, mean=mean, transform=True)
    elif masked:
        head = HeadConfig(transform=True, bias=fields.flag("decoder_bias", True))
    stack |= {
        "activation": activation,
        "gated": True,
        "norm": "layer",
        "input_norm": True,
        "position": "rotary",
        **_read_windows(fields, stack["layers"]),
    }
    return build_config(
        **fields.read(_MODEL),
        encoder=stack,
        head=head,
        tied_embeddings=masked and fields.flag("tie_word_embeddings", True),
        special_tokens=fields.special_tokens(pad=50283, bos=50281, eos=50282, mask=None),
    )


def _pools_mean(fields: Fields) -> bool:
    """Returns whether a text is read by the mean of its tokens, rather than by the first."""
    pooling = fields.values.get("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise refusal("classifier_pooling", pooling, "must be 'cls' or 'mean'")
    return bool(pooling == "mean")


def _read_windows(fields: Fields, layers: int) -> dict[str, Any]:
    """Returns the keys of a stack for windows, and for the rotary period of each kind of layer."""
    every = fields.integer("global_attn_every_n_layers", 3)
    if every < 1:
        raise refusal("global_attn_every_n_layers", every, "must be positive")
    types = fields.values.get("layer_types")
    if types is None:
        types = [_SLIDING if number % every else _FULL for number in range(layers)]
    theta = _read_theta(fields, _FULL, "global_rope_theta", 160000.0)
    if _SLIDING not in types:
        return {"rope_theta": theta}
    window = fields.integer("local_attention", 128) // 2 + 1
    local = _read_theta(fields, _SLIDING, "local_rope_theta", 10000.0, null=theta)
    if _FULL not in types:
        return {"rope_theta": local, "window": window}
    for period in (every, *range(2, layers + 1)):
        if types == [_SLIDING if number % period else _FULL for number in range(layers)]:
            return {
                "window": window,
                "global_every": period,
                "rope_theta": theta,
                "rope_local_theta": None if local == theta else local,
            }
    why = f"full attention must be every n-th of the {layers} layers, from the first"
    raise refusal("layer_types", types, why)


def _read_theta(fields: Fields, layer_type: str, old: str, default: float, null: float | None = None) -> float:
    """Returns the rotary period of one kind of layer, in new or old spelling."""
    section = fields.section("rope_parameters").get(layer_type) or {}
    spellings = {"rope_parameters": section, "rope_scaling": fields.section("rope_scaling")}
    for key, rope in spellings.items():
        kind = rope.get("rope_type", "default")
        if kind != "default":
            raise refusal(f"{key}.rope_type", kind, "only 'default' can be represented")
    if "rope_theta" in section:
        return Fields(section).number("rope_theta")
    if null is not None and old in fields.values and fields.values[old] is None:
        return null
    return fields.number(old, default)


def _write_config(config: ModelConfig) -> dict[str, Any]:
    stack = config.encoder or config.last_stack
    tokens = config.special_tokens
    every = 1 if stack.window is None else stack.global_every
    activation = THEIR_ACTIVATIONS[stack.activation]
    # In the spelling that transformers 4 knows: 5 reads it too.
    return {
        **write_keys(config, _MODEL),
        **write_keys(stack, _STACK),
        # Theirs has the mask in the tokenizer only; this key is read back by ours.
        **write_tokens(tokens, "mask"),
        "cls_token_id": tokens.bos,
        "sep_token_id": tokens.eos,
        "hidden_activation": activation,
        "classifier_activation": activation,
        **dict.fromkeys((*_BIASES, "classifier_bias"), stack.bias),
        "decoder_bias": config.head.bias,
        "classifier_pooling": "mean" if config.head.mean else "cls",
        "classifier_dropout": config.head.dropout,
        "global_attn_every_n_layers": every or stack.layers,
        "local_attention": 2 * ((stack.window or 65) - 1),
        "global_rope_theta": stack.rope_theta,
        "local_rope_theta": stack.rope_local_theta or stack.rope_theta,
        "embedding_dropout": stack.dropout,
        "tie_word_embeddings": config.tied_embeddings,
        **write_label_names(config.head),
    }


def _weights(config: ModelConfig) -> list[Weight]:
    stack = config.encoder or config.last_stack
    width = stack.width
    bias = stack.bias
    weights = [
        table("embedding.weight", _WORDS, config.vocab_size),
        *affine("encoder.", "model.embeddings.", {"input_norm": {"norm": width}}, bias=bias),
    ]
    qkv_rows = (stack.heads + 2 * stack.num_kv_heads) * stack.per_head_width
    block = {
        "attention_norm": {"attn_norm": width},
        "attention.qkv": {"attn.Wqkv": qkv_rows},
        "attention.output": {"attn.Wo": width},
        "feedforward_norm": {"mlp_norm": width},
        "feedforward.gate_up": {"mlp.Wi": 2 * stack.ff_width},
        "feedforward.down": {"mlp.Wo": width},
    }
    # The first block reads embeddings that are normalized already.
    first = {name: parts for name, parts in block.items() if name != "attention_norm"}
    for number in range(stack.layers):
        modules = block if number else first
        weights += affine(f"encoder.blocks.{number}.", f"model.layers.{number}.", modules, bias=bias)
    weights += affine("encoder.", "model.", {"norm": {"final_norm": width}}, bias=bias)
    if config.head.kind == "none":
        return weights
    head = {"transform": {"dense": width}, "norm": {"norm": width}}
    weights += affine("head.", "head.", head, bias=bias)
    if config.head.kind == "labels":
        return weights + score_weights(config.head)
    if not config.tied_embeddings:
        weights.append(table("head.weight", "decoder.weight", config.vocab_size))
    if config.head.bias:
        weights.append(table("head.bias", "decoder.bias", config.vocab_size))
    return weights


def _architecture(config: ModelConfig) -> str:
    if config.head.kind == "labels":
        return f"ModernBert{TEXTS}"
    return "ModernBertForMaskedLM" if config.head.kind == "lm" else "ModernBertModel"


FAMILIES = (
    Family(
        model_type="modernbert",
        read_config=_read_config,
        write_config=_write_config,
        architecture=_architecture,
        weights=_weights,
        aliases={"decoder.weight": _WORDS},
        ignored=(r"model\.rotary_emb\..*", r"model\.layers\.\d+\.attn\.rotary_emb\..*"),
        prefix="model.",
        sizes=_SIZES,
    ),
)
