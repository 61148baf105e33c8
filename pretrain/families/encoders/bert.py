"""BERT (Devlin et al. 2019), an encoder, with the heads that RoBERTa, DistilBERT and ELECTRA have too.

They differ in names, in what comes before the scores of each head, in the offset of learned
positions (RoBERTa: its padding's id and one more), and in the width of tables (ELECTRA).

The head of next-sentence prediction is dropped. So is the pooler of a model with a head that does
not read it, as their classes drop it too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.families.config_json import Fields, Keys, refusal
from pretrain.families.family import Family, Weight, affine, own_head, table
from pretrain.families.label_names import (
    CHOICES,
    SPANS,
    TEXTS,
    WORDS,
    find_unit,
    read_label_head,
    score_weights,
    unit_of,
    write_label_names,
)
from pretrain.families.sizes import Architecture, Sizes
from pretrain.families.stack_tables import Modules, StackNames, Table, table_family

BERT = Architecture(
    ("encoder",),
    {
        "activation": "gelu",
        "gated": False,
        "norm": "layer",
        "norm_eps": 1e-12,
        "norm_placement": "post",
        "input_norm": True,
        "bias": True,
        "position": "learned",
        "token_types": 2,
        "dropout": 0.1,
    },
    {
        "head": {"transform": True, "bias": True},
        "max_seq_len": 512,
        "tied_embeddings": True,
        "init_scaled": False,
    },
)
"""Devlin et al. 2019, 3 and appendix A.2; eps and initialization as released."""
_SIZES = {
    "bert-base": BERT.size(12, 768, 12, 3072, of=(30522, 109_514_298)),
    "bert-large": BERT.size(24, 1024, 16, 4096, of=(30522, 335_174_458)),
    "bert-tiny": BERT.size(2, 128, 2, 512, of=(30522, 4_416_698)),
}
_KEYS: Keys = {
    "num_hidden_layers": ("layers", 12),
    "hidden_size": ("width", 768),
    "num_attention_heads": ("heads", 12),
    "intermediate_size": ("ff_width", 3072),
    "layer_norm_eps": ("norm_eps", 1e-12),
    "type_vocab_size": ("token_types", 2),
    "hidden_dropout_prob": ("dropout", 0.1),
    "attention_probs_dropout_prob": ("attention_dropout", 0.1),
}
_MODEL_KEYS: Keys = {
    "vocab_size": ("model.vocab_size", 30522),
    "max_position_embeddings": ("model.max_seq_len", 512),
    "initializer_range": ("model.init_std", 0.02),
}
BLOCK = {
    "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "feedforward.up": ("intermediate.dense",),
    "feedforward.down": ("output.dense",),
    "feedforward_norm": ("output.LayerNorm",),
}
BUILT_IN = {
    "gated": False, "norm": "layer", "norm_placement": "post", "input_norm": True, "bias": True,
    "position": "learned", "model.init_scaled": False,
}  # fmt: skip
"""Values that no key changes."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What one class of theirs has above the stack.

    Attributes:
        layer: Module of the scores.
        pooler: Module before them that reads the first position, and its `activation`.
        dropout: Key of the rate before the scores; empty: none.
        rate: Default of `dropout`. None: the rate of the stack.
    """

    layer: str
    pooler: str = ""
    activation: str = "tanh"
    dropout: str = "classifier_dropout"
    rate: float | None = None


BOTH = {SPANS: Scores("qa_outputs", dropout=""), WORDS: Scores("classifier")}
"""Heads that all but DistilBERT have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BertHeads:
    """The differences of one `model_type` above its stack.

    Attributes:
        name: Prefix of the class names; `prefix`: of names of tensors.
        transform, norm, decoder, bias: Modules of the head of a language model, and the bias that
            is tied to the decoder's.
        heads: By class; where none is named, the first whose tensors are there.
        pooler: Module of the base model.
        activation: Activation of `transform`. None: the activation of the stack.
        offset: Positions begin after the padding's id.
        narrow: Tables have a width of their own.
        typed: They have token types.
    """

    name: str
    prefix: str
    transform: str
    norm: str
    decoder: str
    bias: str
    heads: Mapping[str, Scores]
    pooler: str = ""
    activation: Literal["gelu"] | None = None
    offset: bool = False
    narrow: bool = False
    typed: bool = True


_SUMMARY = {"summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"}
"""Keys of what ELECTRA reads a choice by."""


def _tensors(scores: Scores) -> set[str]:
    return {f"{name}.weight" for name in (scores.layer, scores.pooler) if name}


def _read_scores(unit: str, scores: Scores, fields: Fields, dropout: float) -> dict[str, Any]:
    rate = dropout if scores.rate is None else scores.rate
    head = read_label_head(fields, unit, dropout=rate, key=scores.dropout)
    if scores.pooler.startswith("sequence_summary"):
        for key, allowed in _SUMMARY.items():
            fields.only(key, allowed, "the first position passes a layer and that activation")
    values = {"model.head": head, "model.pooler": bool(scores.pooler), "model.tied_embeddings": False}
    return values | ({"model.pooler_activation": scores.activation} if scores.pooler else {})


def _read_head(
    heads: BertHeads, fields: Fields, names: frozenset[str], found: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    units = {unit: _tensors(scores) for unit, scores in heads.heads.items()}
    unit = find_unit(fields, names, heads.name, units)
    if unit is not None:
        return _read_scores(unit, heads.heads[unit], fields, found["dropout"])
    if f"{heads.transform}.weight" not in names and not fields.claims(f"{heads.name}ForMaskedLM"):
        pooler = f"{heads.pooler}.weight" in names
        head = HeadConfig(kind="none")
        return {"model.head": head, "model.pooler": pooler, "model.tied_embeddings": False}
    activation = None if heads.activation == found["activation"] else heads.activation
    head = HeadConfig(transform=True, bias=True, activation=activation)
    return {"model.head": head, "model.tied_embeddings": fields.flag("tie_word_embeddings", True)}


def _read(
    heads: BertHeads, fields: Fields, names: frozenset[str], found: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    if found["token_types"] < 1 and heads.typed:
        raise refusal("type_vocab_size", found["token_types"], "theirs has a table of token types")
    further = _read_head(heads, fields, names, found)
    tokens, rows = found["model.special_tokens"], found["model.max_seq_len"]
    if heads.offset:
        if tokens.pad is None or rows <= tokens.pad + 1:
            why = f"positions begin after it, in a table of max_position_embeddings={rows} rows"
            raise refusal("pad_token_id", tokens.pad, why)
        further |= {"position_offset": "pad", "model.max_seq_len": rows - tokens.pad - 1}
    if heads.narrow:
        width = fields.integer("embedding_size", 128)
        further["embedding_width"] = None if width == found["width"] else width
    return further


def _write(heads: BertHeads, config: ModelConfig) -> dict[str, Any]:
    scores = heads.heads.get(unit_of(config))
    # Theirs has the mask in the tokenizer only; its key is read back by ours.
    keys = write_label_names(config.head)
    if heads.offset:
        pad = config.first_position("encoder") - 1
        keys |= {"pad_token_id": pad, "max_position_embeddings": config.max_seq_len + pad + 1}
    if scores and scores.dropout:
        keys[scores.dropout] = config.head.dropout
    if heads.narrow:
        keys["embedding_size"] = (config.encoder or config.last_stack).table_width
    if config.head.record.scores_words and not config.tied_embeddings:
        keys["tie_word_embeddings"] = False
    return keys


def _ends(heads: BertHeads, config: ModelConfig) -> list[Weight]:
    width = (config.encoder or config.last_stack).width
    scores = heads.heads.get(unit_of(config))
    weights = []
    if config.pooler:
        pooler = scores.pooler if scores else heads.pooler
        weights += affine("", "", {"pooler": {pooler: width}}, bias=True)
    if config.head.record.scores_words:
        narrow = config.head_width
        head = {"transform": {heads.transform: narrow}, "norm": {heads.norm: narrow}}
        weights += affine("head.", "", head, bias=True)
        weights += own_head(config, f"{heads.decoder}.weight")
        weights.append(_head_bias(heads, config))
    if scores is not None:
        weights += score_weights(config.head, scores.layer)
        if config.head.transform:
            transform = scores.layer.removesuffix("_prediction")
            weights += affine("head.", "", {"transform": {transform: width}}, bias=True)
    return weights


def _head_bias(heads: BertHeads, config: ModelConfig) -> Weight:
    if config.tied_embeddings or heads.bias == f"{heads.decoder}.bias":
        return table("head.bias", heads.bias, config.vocab_size)
    bias = table("head.bias", f"{heads.decoder}.bias", config.vocab_size)
    return replace(bias, unread=(heads.bias,))


def bert_family(
    model_type: str, heads: BertHeads, sizes: Sizes, *, keys: Keys = _KEYS, block: Modules = BLOCK,
    layers: str = "encoder.layer.{}.", last_norm: str = "", **differs: Any,
) -> Family:  # fmt: skip
    """Builds the family of a BERT; `last_norm`: module after the layers; `differs`: fields of `Table`."""
    tables = f"{heads.prefix}embeddings."
    words = f"{tables}word_embeddings.weight"
    aliases = {f"{heads.decoder}.weight": words}
    if heads.bias != f"{heads.decoder}.bias":
        aliases[f"{heads.decoder}.bias"] = heads.bias
    before = {
        "position": f"{tables}position_embeddings.weight",
        "input_norm": f"{tables}LayerNorm",
        "token_type": f"{tables}token_type_embeddings.weight",
        "expand": f"{heads.prefix}embeddings_project",
    }
    if not differs.get("built_in", BUILT_IN)["input_norm"]:
        del before["input_norm"]
    after = {"norm": f"{heads.prefix}{last_norm}"} if last_norm else {}
    usual: dict[str, Any] = {"tokens": {"pad": 0, "mask": None}, "built_in": BUILT_IN}
    family = Table(
        model_type=model_type, name=heads.name, scorer="ForMaskedLM", unit=unit_of,
        keys={**keys, **_MODEL_KEYS}, roles=("mask",), words=words,
        fixed={"position_embedding_type": ("absolute", "no stack of ours has relative keys")},
        refused={
            "is_decoder": (False, "an encoder of ours has no causal mask"),
            "add_cross_attention": (False, "an encoder of ours has no cross attention"),
        },
        read=partial(_read, heads), write=partial(_write, heads), ends=partial(_ends, heads),
        stacks={"encoder": StackNames(f"{heads.prefix}{layers}", block, before, after)},
        **(usual | differs),
    )  # fmt: skip
    old = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))
    ignored = (rf"{heads.prefix}pooler\..*", r"cls\.seq_relationship\..*")
    return table_family(
        family, aliases=aliases, ignored=ignored, renames=old, prefix=heads.prefix, sizes=sizes
    )  # fmt: skip


_POOLED = Scores("classifier", "bert.pooler.dense")
_HEADS = BertHeads(
    name="Bert", prefix="bert.", transform="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm", decoder="cls.predictions.decoder",
    bias="cls.predictions.bias", heads={TEXTS: _POOLED, CHOICES: _POOLED, **BOTH},
    pooler="bert.pooler.dense",
)  # fmt: skip
FAMILIES = (bert_family("bert", _HEADS, _SIZES),)
