"""ModernBERT (Warner et al. 2024): a pre-norm encoder with rotary positions and alternating sliding windows.

Theirs counts a window over both sides: `local_attention` 128 sees 64 positions to the left and 64 to the right, those
that are fewer than 65 away, which is how ours counts.
"""

from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig, StackConfig
from pretrain.interop.family import Family, Weight, affine
from pretrain.interop.fields import THEIR_ACTIVATIONS, Fields, build_config, refusal
from pretrain.interop.label_names import TEXTS, find_classifier, label_weights, read_label_head, write_label_names

_WORDS = "model.embeddings.tok_embeddings.weight"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_BIASES = ("norm_bias", "attention_bias", "mlp_bias")


def _read_config(values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
    fields = Fields(values)
    labelled = find_classifier(fields, names, "ModernBert")
    masked = not labelled and ("head.dense.weight" in names or fields.claims("ModernBertForMaskedLM"))
    transform = masked or labelled is not None
    activation, bias = fields.activation("hidden_activation", "gelu"), fields.flag("norm_bias", False)
    for key in (*_BIASES, "classifier_bias") if transform else _BIASES:
        fields.only(key, bias, f"a stack of ours has all its biases or none, and norm_bias is {bias}", missing=False)
    if transform and fields.activation("classifier_activation", "gelu") != activation:
        raise refusal("classifier_activation", values.get("classifier_activation"), "must be hidden_activation")
    head = HeadConfig(kind="none")
    if labelled:
        mean = labelled == TEXTS and _reads_mean(fields)
        head = read_label_head(fields, dropout=0.0, mean=mean, transform=True)
    elif masked:
        head = HeadConfig(transform=True, bias=fields.flag("decoder_bias", True))
    tokens = fields.special_tokens(pad=50283, bos=50281, eos=50282)
    return build_config(
        encoder={
            "layers": fields.integer("num_hidden_layers", 22),
            "width": fields.integer("hidden_size", 768),
            "heads": fields.integer("num_attention_heads", 12),
            "ff_width": fields.integer("intermediate_size", 1152),
            "activation": activation,
            "gated": True,
            "norm": "layer",
            "norm_eps": fields.number("norm_eps", 1e-5),
            "input_norm": True,
            "bias": bias,
            "position": "rotary",
            "dropout": fields.number("mlp_dropout", 0.0),
            "attention_dropout": fields.number("attention_dropout", 0.0),
            **_read_windows(fields),
        },
        head=head,
        vocab_size=fields.integer("vocab_size", 50368),
        max_seq_len=fields.integer("max_position_embeddings", 8192),
        tied_embeddings=masked and fields.flag("tie_word_embeddings", True),
        init_std=fields.number("initializer_range", 0.02),
        special_tokens=tokens.model_copy(update={"mask": fields.optional_integer("mask_token_id")}),
    )


def _reads_mean(fields: Fields) -> bool:
    """Whether what is read of a text is the mean of its tokens, and not the first."""
    pooling = fields.values.get("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise refusal("classifier_pooling", pooling, "must be 'cls' or 'mean'")
    return bool(pooling == "mean")


def _read_windows(fields: Fields) -> dict[str, Any]:
    """Returns the keys of a stack that say which layers have a window, and the rotary period of each kind of layer."""
    layers, every = fields.integer("num_hidden_layers", 22), fields.integer("global_attn_every_n_layers", 3)
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
    found = {"window": window, "rope_theta": theta, "rope_local_theta": None if local == theta else local}
    for period in (every, *range(2, layers + 1)):
        if types == [_SLIDING if number % period else _FULL for number in range(layers)]:
            return found | {"global_every": period}
    raise refusal("layer_types", types, f"full attention must be every n-th of the {layers} layers, from the first")


def _read_theta(fields: Fields, layer_type: str, old: str, default: float, null: float | None = None) -> float:
    """Returns the rotary period of one kind of layer, from the spelling of transformers 5 or the older one."""
    section = fields.section("rope_parameters").get(layer_type) or {}
    for key, rope in (("rope_parameters", section), ("rope_scaling", fields.section("rope_scaling"))):
        if rope.get("rope_type", "default") != "default":
            raise refusal(f"{key}.rope_type", rope["rope_type"], "only 'default' can be represented")
    if "rope_theta" in section:
        return Fields(section).number("rope_theta")
    if null is not None and old in fields.values and fields.values[old] is None:
        return null
    return fields.number(old, default)


def _write_config(config: ModelConfig) -> dict[str, Any]:
    stack, tokens = config.encoder or config.last_stack, config.special_tokens
    every = 1 if stack.window is None else stack.global_every
    # In the spelling that transformers 4 knows: 5 reads it too.
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": stack.width,
        "num_hidden_layers": stack.layers,
        "num_attention_heads": stack.heads,
        "intermediate_size": stack.ff_width,
        "hidden_activation": THEIR_ACTIVATIONS[stack.activation],
        "classifier_activation": THEIR_ACTIVATIONS[stack.activation],
        "max_position_embeddings": config.max_seq_len,
        "initializer_range": config.init_std,
        "norm_eps": stack.norm_eps,
        **dict.fromkeys((*_BIASES, "classifier_bias"), stack.bias),
        "decoder_bias": config.head.bias,
        "classifier_pooling": "mean" if config.head.mean else "cls",
        "classifier_dropout": config.head.dropout,
        "global_attn_every_n_layers": every or stack.layers,
        "local_attention": 2 * ((stack.window or 65) - 1),
        "global_rope_theta": stack.rope_theta,
        "local_rope_theta": stack.rope_local_theta or stack.rope_theta,
        "attention_dropout": stack.attention_weight_dropout,
        "embedding_dropout": stack.dropout,
        "mlp_dropout": stack.dropout,
        "tie_word_embeddings": config.tied_embeddings,
        "pad_token_id": tokens.pad,
        "bos_token_id": tokens.bos,
        "cls_token_id": tokens.bos,
        "eos_token_id": tokens.eos,
        "sep_token_id": tokens.eos,
        "mask_token_id": tokens.mask,  # not one of theirs, who have it in the tokenizer only; read back by us
        **write_label_names(config.head),
    }


def _weights(config: ModelConfig) -> list[Weight]:
    stack = config.encoder or config.last_stack
    assert config.vocab_size is not None
    width, bias, vocab_size = stack.width, stack.bias, config.vocab_size
    weights = [
        Weight("embedding.weight", ((_WORDS, vocab_size),), vocab=True),
        *affine("encoder.input_norm", ("model.embeddings.norm", width), bias=bias),
    ]
    for number in range(stack.layers):
        weights += _block_weights(stack, number)
    weights += affine("encoder.norm", ("model.final_norm", width), bias=bias)
    if config.head.kind == "none":
        return weights
    weights += affine("head.transform", ("head.dense", width), bias=bias)
    weights += affine("head.norm", ("head.norm", width), bias=bias)
    if config.head.kind == "labels":
        return weights + label_weights(config.head)
    if not config.tied_embeddings:
        weights.append(Weight("head.weight", (("decoder.weight", vocab_size),), vocab=True))
    if config.head.bias:
        weights.append(Weight("head.bias", (("decoder.bias", vocab_size),), vocab=True))
    return weights


def _block_weights(stack: StackConfig, number: int) -> list[Weight]:
    ours, theirs, width = f"encoder.blocks.{number}", f"model.layers.{number}", stack.width
    weights = [] if number == 0 else affine(f"{ours}.attention_norm", (f"{theirs}.attn_norm", width), bias=stack.bias)
    qkv_rows = (stack.heads + 2 * stack.num_kv_heads) * stack.per_head_width
    weights += affine(f"{ours}.attention.qkv", (f"{theirs}.attn.Wqkv", qkv_rows), bias=stack.bias)
    weights += affine(f"{ours}.attention.output", (f"{theirs}.attn.Wo", width), bias=stack.bias)
    weights += affine(f"{ours}.feedforward_norm", (f"{theirs}.mlp_norm", width), bias=stack.bias)
    weights += affine(f"{ours}.feedforward.gate_up", (f"{theirs}.mlp.Wi", 2 * stack.ff_width), bias=stack.bias)
    weights += affine(f"{ours}.feedforward.down", (f"{theirs}.mlp.Wo", width), bias=stack.bias)
    return weights


def _aliases(config: ModelConfig) -> dict[str, str]:
    return {"decoder.weight": _WORDS} if config.tied_embeddings else {}


def _architecture(config: ModelConfig) -> str:
    if config.head.kind == "labels":
        return f"ModernBert{TEXTS}"
    return "ModernBertForMaskedLM" if config.head.kind == "lm" else "ModernBertModel"


MODERNBERT = Family(
    model_type="modernbert",
    read_config=_read_config,
    write_config=_write_config,
    architecture=_architecture,
    weights=_weights,
    aliases=_aliases,
    ignored=(r"model\.rotary_emb\..*", r"model\.layers\.\d+\.attn\.rotary_emb\..*"),
    prefix="model.",
)
