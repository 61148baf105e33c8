"""BERT (Devlin et al. 2019): an encoder with a masked language model's head or one over labels, or bare.

The head of next-sentence prediction is dropped. So is the pooler beside a language model's head, which no objective of
pretraining reads, and beside labels of words: `BertForMaskedLM` and `BertForTokenClassification` drop it too.
"""

from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.interop.family import Family, Weight, affine
from pretrain.interop.fields import THEIR_ACTIVATIONS, Fields, build_config, refusal
from pretrain.interop.label_names import (
    TEXTS,
    WORDS,
    find_classifier,
    label_weights,
    read_label_head,
    write_label_names,
)

_HEAD, _POOLER, _WORDS = "cls.predictions", "bert.pooler.dense", "bert.embeddings.word_embeddings.weight"


def _read_config(values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
    fields = Fields(values)
    fields.only("position_embedding_type", "absolute", "no stack of ours has relative keys")
    fields.only("is_decoder", False, "an encoder of ours has no causal mask")
    fields.only("add_cross_attention", False, "an encoder of ours has no cross attention")
    labelled = find_classifier(fields, names, "Bert", f"{_POOLER}.weight")
    masked = not labelled and (f"{_HEAD}.transform.dense.weight" in names or fields.claims("BertForMaskedLM"))
    head = HeadConfig(kind="none")
    if labelled:
        head = read_label_head(fields, dropout=fields.number("hidden_dropout_prob", 0.1))
    elif masked:
        head = HeadConfig(transform=True, bias=True)
        fields.only("tie_word_embeddings", True, "the bias of an untied head is stored apart from the one that is used")
    tokens = fields.special_tokens(pad=0)
    return build_config(
        encoder=_read_stack(fields),
        head=head,
        vocab_size=fields.integer("vocab_size", 30522),
        max_seq_len=fields.integer("max_position_embeddings", 512),
        tied_embeddings=masked,
        pooler=labelled == TEXTS or (not labelled and not masked and f"{_POOLER}.weight" in names),
        init_std=fields.number("initializer_range", 0.02),
        init_scaled=False,
        special_tokens=tokens.model_copy(update={"mask": fields.optional_integer("mask_token_id")}),
    )


def _read_stack(fields: Fields) -> dict[str, Any]:
    token_types = fields.integer("type_vocab_size", 2)
    if token_types < 1:
        raise refusal("type_vocab_size", token_types, "a BERT has a table of token types")
    return {
        "layers": fields.integer("num_hidden_layers", 12),
        "width": fields.integer("hidden_size", 768),
        "heads": fields.integer("num_attention_heads", 12),
        "ff_width": fields.integer("intermediate_size", 3072),
        "activation": fields.activation("hidden_act", "gelu"),
        "gated": False,
        "norm": "layer",
        "norm_eps": fields.number("layer_norm_eps", 1e-12),
        "norm_placement": "post",
        "input_norm": True,
        "bias": True,
        "position": "learned",
        "token_types": token_types,
        "dropout": fields.number("hidden_dropout_prob", 0.1),
        "attention_dropout": fields.number("attention_probs_dropout_prob", 0.1),
    }


def _write_config(config: ModelConfig) -> dict[str, Any]:
    stack, tokens = config.encoder or config.last_stack, config.special_tokens
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": stack.width,
        "num_hidden_layers": stack.layers,
        "num_attention_heads": stack.heads,
        "intermediate_size": stack.ff_width,
        "hidden_act": THEIR_ACTIVATIONS[stack.activation],
        "hidden_dropout_prob": stack.dropout,
        "attention_probs_dropout_prob": stack.attention_weight_dropout,
        "max_position_embeddings": config.max_seq_len,
        "position_embedding_type": "absolute",
        "type_vocab_size": stack.token_types,
        "initializer_range": config.init_std,
        "layer_norm_eps": stack.norm_eps,
        "pad_token_id": tokens.pad,
        "bos_token_id": tokens.bos,
        "eos_token_id": tokens.eos,
        "mask_token_id": tokens.mask,  # not one of theirs, who have it in the tokenizer only; read back by us
        "classifier_dropout": config.head.dropout if config.head.kind == "labels" else None,
        **write_label_names(config.head),
    }


def _weights(config: ModelConfig) -> list[Weight]:
    stack = config.encoder or config.last_stack
    assert config.vocab_size is not None
    width, table = stack.width, "bert.embeddings"
    weights = [
        Weight("embedding.weight", ((_WORDS, config.vocab_size),), vocab=True),
        Weight("encoder.position.weight", ((f"{table}.position_embeddings.weight", config.max_seq_len),)),
        Weight("encoder.token_type.weight", ((f"{table}.token_type_embeddings.weight", stack.token_types),)),
        *affine("encoder.input_norm", (f"{table}.LayerNorm", width), bias=True),
    ]
    for number in range(stack.layers):
        ours, theirs = f"encoder.blocks.{number}", f"bert.encoder.layer.{number}"
        parts = [(f"{theirs}.attention.self.{name}", width) for name in ("query", "key", "value")]
        weights += affine(f"{ours}.attention.qkv", *parts, bias=True)
        weights += affine(f"{ours}.attention.output", (f"{theirs}.attention.output.dense", width), bias=True)
        weights += affine(f"{ours}.attention_norm", (f"{theirs}.attention.output.LayerNorm", width), bias=True)
        weights += affine(f"{ours}.feedforward.up", (f"{theirs}.intermediate.dense", stack.ff_width), bias=True)
        weights += affine(f"{ours}.feedforward.down", (f"{theirs}.output.dense", width), bias=True)
        weights += affine(f"{ours}.feedforward_norm", (f"{theirs}.output.LayerNorm", width), bias=True)
    if config.pooler:
        weights += affine("pooler", (_POOLER, width), bias=True)
    if config.head.kind == "lm":
        weights += affine("head.transform", (f"{_HEAD}.transform.dense", width), bias=True)
        weights += affine("head.norm", (f"{_HEAD}.transform.LayerNorm", width), bias=True)
        weights.append(Weight("head.bias", ((f"{_HEAD}.bias", config.vocab_size),), vocab=True))
    if config.head.kind == "labels":
        weights += label_weights(config.head)
    return weights


def _architecture(config: ModelConfig) -> str:
    if config.head.kind == "labels":
        return f"Bert{TEXTS if config.pooler else WORDS}"
    return "BertForMaskedLM" if config.head.kind == "lm" else "BertModel"


def _aliases(config: ModelConfig) -> dict[str, str]:
    return {f"{_HEAD}.decoder.weight": _WORDS, f"{_HEAD}.decoder.bias": f"{_HEAD}.bias"}


BERT = Family(
    model_type="bert",
    read_config=_read_config,
    write_config=_write_config,
    architecture=_architecture,
    weights=_weights,
    aliases=_aliases,
    ignored=(r"bert\.embeddings\.position_ids", r"bert\.pooler\..*", r"cls\.seq_relationship\..*"),
    renames=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
    prefix="bert.",
)
