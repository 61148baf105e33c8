"""ModernBERT (Warner et al. 2024): a pre-norm encoder with rotary positions and sliding windows.

Theirs counts a window over both sides: `local_attention` 128 sees 64 positions to the left and 64
to the right, which are the fewer than 65 positions away of our `window`.
"""

from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.families.config_json import THEIR_ACTIVATIONS, Fields, Keys, refusal
from pretrain.families.family import Weight, affine, table
from pretrain.families.label_names import (
    TEXTS,
    WORDS,
    find_unit,
    read_label_head,
    score_weights,
    write_label_names,
)
from pretrain.families.sizes import Architecture
from pretrain.families.stack_tables import StackNames, Table, table_family

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
_KEYS: Keys = {
    "num_hidden_layers": ("layers", 22),
    "hidden_size": ("width", 768),
    "num_attention_heads": ("heads", 12),
    "intermediate_size": ("ff_width", 1152),
    "norm_eps": ("norm_eps", 1e-5),
    "norm_bias": ("bias", False),
    "mlp_dropout": ("dropout", 0.0),
    "attention_dropout": ("attention_dropout", 0.0),
    "vocab_size": ("model.vocab_size", 50368),
    "max_position_embeddings": ("model.max_seq_len", 8192),
    "initializer_range": ("model.init_std", 0.02),
}
_NAMES = StackNames(
    layers="model.layers.{}.",
    # The first layer has no norm for attention: embeddings are normalized already.
    block={
        "attention_norm": ("attn_norm",),
        "attention.qkv": ("attn.Wqkv",),
        "attention.output": ("attn.Wo",),
        "feedforward_norm": ("mlp_norm",),
        "feedforward.gate_up": ("mlp.Wi",),
        "feedforward.down": ("mlp.Wo",),
    },
    before={"input_norm": "model.embeddings.norm"},
    after={"norm": "model.final_norm"},
)
_BIASES = ("attention_bias", "mlp_bias")
_WORDS = "model.embeddings.tok_embeddings.weight"
_FULL, _SLIDING = "full_attention", "sliding_attention"


def _read(fields: Fields, names: frozenset[str], found: dict[str, Any]) -> dict[str, Any]:
    labelled = find_unit(fields, names, "ModernBert", {TEXTS: ("classifier.weight",), WORDS: ()})
    is_stored = "head.dense.weight" in names
    masked = not labelled and (is_stored or fields.claims("ModernBertForMaskedLM"))
    bias = found["bias"]
    keys: tuple[str, ...] = _BIASES
    if masked or labelled:
        keys = (*_BIASES, "classifier_bias")
        if fields.activation("classifier_activation", "gelu") != found["activation"]:
            value = fields.values.get("classifier_activation")
            raise refusal("classifier_activation", value, "must be hidden_activation")
    for key in keys:
        why = f"a stack of ours has all its biases or none, and norm_bias is {bias}"
        fields.only(key, bias, why, missing=False)
    head = HeadConfig(kind="none")
    if labelled:
        mean = labelled == TEXTS and _pools_mean(fields)
        head = read_label_head(fields, dropout=0.0, mean=mean, transform=True)
    elif masked:
        head = HeadConfig(transform=True, bias=fields.flag("decoder_bias", True))
    tied = masked and fields.flag("tie_word_embeddings", True)
    windows = _read_windows(fields, found["layers"])
    return {**windows, "model.head": head, "model.tied_embeddings": tied}


def _pools_mean(fields: Fields) -> bool:
    pooling = fields.values.get("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise refusal("classifier_pooling", pooling, "must be 'cls' or 'mean'")
    return bool(pooling == "mean")


def _read_windows(fields: Fields, layers: int) -> dict[str, Any]:
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


def _write(config: ModelConfig) -> dict[str, Any]:
    stack = config.encoder or config.last_stack
    tokens = config.special_tokens
    every = 1 if stack.window is None else stack.global_every
    # In the spelling that transformers 4 knows: 5 reads it too.
    return {
        # Theirs has the mask in the tokenizer only; its key is read back by ours.
        "cls_token_id": tokens.bos,
        "sep_token_id": tokens.eos,
        "classifier_activation": THEIR_ACTIVATIONS[stack.activation],
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


def _ends(config: ModelConfig) -> list[Weight]:
    if config.head.kind == "none":
        return []
    stack = config.encoder or config.last_stack
    head = {"transform": {"dense": stack.width}, "norm": {"norm": stack.width}}
    weights = affine("head.", "head.", head, bias=stack.bias)
    if config.head.record.names_labels:
        return weights + score_weights(config.head)
    if not config.tied_embeddings:
        weights.append(table("head.weight", "decoder.weight", config.vocab_size))
    if config.head.bias:
        weights.append(table("head.bias", "decoder.bias", config.vocab_size))
    return weights


_TABLE = Table(
    model_type="modernbert", name="ModernBert", scorer="ForMaskedLM",
    unit=lambda config: TEXTS if config.head.record.names_labels else "",
    keys=_KEYS, activation=("hidden_activation", "gelu"),
    tokens={"pad": 50283, "bos": 50281, "eos": 50282, "mask": None}, roles=("mask",),
    built_in={"gated": True, "norm": "layer", "input_norm": True, "position": "rotary"},
    read=_read, write=_write, words=_WORDS, stacks={"encoder": _NAMES}, ends=_ends,
)  # fmt: skip
FAMILIES = (
    table_family(
        _TABLE, aliases={"decoder.weight": _WORDS}, prefix="model.", sizes=_SIZES,
        ignored=(r"model\.rotary_emb\..*", r"model\.layers\.\d+\.attn\.rotary_emb\..*"),
    ),
)  # fmt: skip
