"""BERT (Devlin et al. 2019): an encoder with a head over tokens or labels, or without one.

The head of next-sentence prediction is dropped. So is the pooler of a model with a language model's
head, where no objective of pretraining reads it, or with labels of words: `BertForMaskedLM` and
`BertForTokenClassification` drop it too.
"""

from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.interop.family import Family, Weight, affine, table
from pretrain.interop.fields import THEIR_ACTIVATIONS, Fields, Keys, build_config, refusal, write_keys, write_tokens
from pretrain.interop.label_names import (
    TEXTS,
    WORDS,
    find_classifier,
    label_weights,
    read_label_head,
    write_label_names,
)

_STACK: Keys = {
    "num_hidden_layers": ("layers", 12),
    "hidden_size": ("width", 768),
    "num_attention_heads": ("heads", 12),
    "intermediate_size": ("ff_width", 3072),
    "layer_norm_eps": ("norm_eps", 1e-12),
    "type_vocab_size": ("token_types", 2),
    "hidden_dropout_prob": ("dropout", 0.1),
    "attention_probs_dropout_prob": ("attention_dropout", 0.1),
}
_MODEL: Keys = {
    "vocab_size": ("vocab_size", 30522),
    "max_position_embeddings": ("max_seq_len", 512),
    "initializer_range": ("init_std", 0.02),
}
_TABLES = "bert.embeddings."
_HEAD = "cls.predictions."
_POOLER = "bert.pooler.dense"
_WORDS = f"{_TABLES}word_embeddings.weight"


def _read_config(values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
    fields = Fields(values)
    fields.only("position_embedding_type", "absolute", "no stack of ours has relative keys")
    fields.only("is_decoder", False, "an encoder of ours has no causal mask")
    fields.only("add_cross_attention", False, "an encoder of ours has no cross attention")
    stack = fields.read(_STACK)
    # Without `architectures`, tensors tell classes apart: a head, a classifier, a pooler.
    labelled = find_classifier(fields, names, "Bert", f"{_POOLER}.weight")
    masked = not labelled and (f"{_HEAD}transform.dense.weight" in names or fields.claims("BertForMaskedLM"))
    head = HeadConfig(kind="none")
    if labelled:
        head = read_label_head(fields, dropout=stack["dropout"])
    elif masked:
        head = HeadConfig(transform=True, bias=True)
        fields.only("tie_word_embeddings", True, "an untied head stores a second bias, which is not used")
    if stack["token_types"] < 1:
        raise refusal("type_vocab_size", stack["token_types"], "a BERT has a table of token types")
    stack |= {
        "activation": fields.activation("hidden_act", "gelu"),
        "gated": False,
        "norm": "layer",
        "norm_placement": "post",
        "input_norm": True,
        "bias": True,
        "position": "learned",
    }
    return build_config(
        **fields.read(_MODEL),
        encoder=stack,
        head=head,
        tied_embeddings=masked,
        pooler=labelled == TEXTS or (not labelled and not masked and f"{_POOLER}.weight" in names),
        init_scaled=False,
        special_tokens=fields.special_tokens(pad=0, mask=None),
    )


def _write_config(config: ModelConfig) -> dict[str, Any]:
    stack = config.encoder or config.last_stack
    return {
        **write_keys(config, _MODEL),
        **write_keys(stack, _STACK),
        # Theirs has the mask in the tokenizer only; this key is read back by ours.
        **write_tokens(config.special_tokens, "mask"),
        "hidden_act": THEIR_ACTIVATIONS[stack.activation],
        "position_embedding_type": "absolute",
        "classifier_dropout": config.head.dropout if config.head.kind == "labels" else None,
        **write_label_names(config.head),
    }


def _weights(config: ModelConfig) -> list[Weight]:
    stack = config.encoder or config.last_stack
    width = stack.width
    positions = ((f"{_TABLES}position_embeddings.weight", config.max_seq_len),)
    token_types = ((f"{_TABLES}token_type_embeddings.weight", stack.token_types),)
    weights = [
        table("embedding.weight", _WORDS, config.vocab_size),
        Weight("encoder.position.weight", positions),
        Weight("encoder.token_type.weight", token_types),
        *affine("encoder.", _TABLES, {"input_norm": {"LayerNorm": width}}, bias=True),
    ]
    block = {
        "attention.qkv": {f"attention.self.{part}": width for part in ("query", "key", "value")},
        "attention.output": {"attention.output.dense": width},
        "attention_norm": {"attention.output.LayerNorm": width},
        "feedforward.up": {"intermediate.dense": stack.ff_width},
        "feedforward.down": {"output.dense": width},
        "feedforward_norm": {"output.LayerNorm": width},
    }
    for number in range(stack.layers):
        theirs = f"bert.encoder.layer.{number}."
        weights += affine(f"encoder.blocks.{number}.", theirs, block, bias=True)
    if config.pooler:
        weights += affine("", "", {"pooler": {_POOLER: width}}, bias=True)
    if config.head.kind == "lm":
        head = {"transform": {"transform.dense": width}, "norm": {"transform.LayerNorm": width}}
        weights += affine("head.", _HEAD, head, bias=True)
        weights.append(table("head.bias", f"{_HEAD}bias", config.vocab_size))
    if config.head.kind == "labels":
        weights += label_weights(config.head)
    return weights


def _architecture(config: ModelConfig) -> str:
    if config.head.kind == "labels":
        return f"Bert{TEXTS if config.pooler else WORDS}"
    return "BertForMaskedLM" if config.head.kind == "lm" else "BertModel"


BERT = Family(
    model_type="bert",
    read_config=_read_config,
    write_config=_write_config,
    architecture=_architecture,
    weights=_weights,
    aliases={f"{_HEAD}decoder.weight": _WORDS, f"{_HEAD}decoder.bias": f"{_HEAD}bias"},
    ignored=(r"bert\.embeddings\.position_ids", r"bert\.pooler\..*", r"cls\.seq_relationship\..*"),
    renames=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
    prefix="bert.",
)
