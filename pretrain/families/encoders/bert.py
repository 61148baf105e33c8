"""BERT (Devlin et al. 2019), RoBERTa (Liu et al. 2019), XLM-R (Conneau et al. 2020), DistilBERT
(Sanh et al. 2019) and ELECTRA (Clark et al. 2020): an encoder with a head, or without one.

They differ in names, in what comes before the scores of each head, in the offset of learned
positions (RoBERTa: its padding's id and one more), and in the width of tables (ELECTRA).

The head of next-sentence prediction is dropped. So is the pooler of a model with a head that does
not read it, as their classes drop it too.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

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
from pretrain.families.family import Family, Weight, affine, own_head, table
from pretrain.families.label_names import (
    CHOICES,
    REPLACED,
    SPANS,
    TEXTS,
    WORDS,
    find_unit,
    read_label_head,
    score_weights,
    unit_of,
    write_label_names,
)
from pretrain.families.sizes import Architecture

_BERT = Architecture(
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
_ROBERTA = Architecture(
    ("encoder",),
    _BERT.stack | {"norm_eps": 1e-5, "token_types": 1, "position_offset": "pad"},
    _BERT.ends,
)
"""Liu et al. 2019, as released: positions begin after the id of padding, 1."""
_XLM_ROBERTA = _ROBERTA._replace(ends=_ROBERTA.ends | {"family": "xlm-roberta"})
"""Conneau et al. 2020, 3, as released."""
_DISTILBERT = _BERT._replace(stack=_BERT.stack | {"token_types": 0})
"""Sanh et al. 2019, 3."""
_ELECTRA = _BERT._replace(ends=_BERT.ends | {"family": "electra"})
"""Clark et al. 2020, 3 and appendix A: a BERT but for the width of the smallest one's tables."""
_SIZES = {
    "bert": {
        "bert-base": _BERT.size(12, 768, 12, 3072, of=(30522, 109_514_298)),
        "bert-large": _BERT.size(24, 1024, 16, 4096, of=(30522, 335_174_458)),
        "bert-tiny": _BERT.size(2, 128, 2, 512, of=(30522, 4_416_698)),
    },
    "roberta": {
        "roberta-base": _ROBERTA.size(12, 768, 12, 3072, of=(50265, 124_697_433)),
        "roberta-large": _ROBERTA.size(24, 1024, 16, 4096, of=(50265, 355_412_057)),
        "roberta-tiny": _ROBERTA.size(2, 64, 4, 256, max_seq_len=128),
    },
    "xlm-roberta": {
        "xlm-roberta-base": _XLM_ROBERTA.size(12, 768, 12, 3072, of=(250002, 278_295_186)),
        "xlm-roberta-large": _XLM_ROBERTA.size(24, 1024, 16, 4096, of=(250002, 560_142_482)),
        "xlm-roberta-tiny": _XLM_ROBERTA.size(2, 64, 4, 256, max_seq_len=128),
    },
    "distilbert": {
        "distilbert-base": _DISTILBERT.size(6, 768, 12, 3072, of=(30522, 66_985_530)),
        "distilbert-tiny": _DISTILBERT.size(2, 64, 4, 256, max_seq_len=128),
    },
    "electra": {
        "electra-small": _ELECTRA.size(
            12, 256, 4, 1024, of=(30522, 13_546_682), embedding_width=128
        ),
        "electra-base": _ELECTRA.size(12, 768, 12, 3072, of=(30522, 109_514_298)),
        "electra-large": _ELECTRA.size(24, 1024, 16, 4096, of=(30522, 335_174_458)),
        "electra-tiny": _ELECTRA.size(2, 64, 4, 256, max_seq_len=128, embedding_width=32),
    },
}  # fmt: skip
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
_DISTILLED: Keys = {
    "n_layers": ("layers", 6),
    "dim": ("width", 768),
    "n_heads": ("heads", 12),
    "hidden_dim": ("ff_width", 3072),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.1),
}
_MODEL: Keys = {
    "vocab_size": ("vocab_size", 30522),
    "max_position_embeddings": ("max_seq_len", 512),
    "initializer_range": ("init_std", 0.02),
}
_QKV = ("query", "key", "value")


@dataclass(frozen=True, slots=True)
class _Block:
    """Names of the modules of a layer, and of the layers."""

    layers: str = "encoder.layer"
    qkv: tuple[str, ...] = tuple(f"attention.self.{part}" for part in _QKV)
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    feedforward_norm: str = "output.LayerNorm"


@dataclass(frozen=True, slots=True)
class _Scores:
    """What one class of theirs has above the stack."""

    layer: str  # module of the scores
    pooler: str = ""  # module before them that reads the first position, and its activation
    activation: str = "tanh"
    dropout: str = "classifier_dropout"  # key of that before the scores; empty: none
    rate: float | None = None  # its default; None: that of the stack


@dataclass(frozen=True, slots=True)
class _Dialect:
    """The differences of one `model_type`, with the defaults of transformers."""

    model_type: str
    name: str  # prefix of class names
    prefix: str
    # Modules of the head of a language model, and the bias that is tied to the decoder's.
    transform: str
    norm: str
    decoder: str
    bias: str
    heads: dict[str, _Scores]  # by class; where none is named, the first whose tensors are there
    pooler: str = ""  # module of the base model
    block: _Block = field(default_factory=_Block)
    stack: Keys = field(default_factory=lambda: _STACK)
    sizes: dict[str, int] = field(default_factory=dict)  # defaults that differ from BERT's
    tokens: dict[str, int | None] = field(default_factory=lambda: {"pad": 0})
    activation: str = "hidden_act"
    head_activation: Literal["gelu"] | None = None  # of `transform`; None: `activation`
    offset: bool = False  # positions begin after the padding's id
    narrow: bool = False  # tables have a width of their own


_BOTH = {SPANS: _Scores("qa_outputs", dropout=""), WORDS: _Scores("classifier")}
_OF_BERT = _Scores("classifier", "bert.pooler.dense")
_OF_DISTILBERT = _Scores("classifier", "pre_classifier", "relu", "seq_classif_dropout", 0.2)
_OF_ROBERTA: dict[str, Any] = {
    "prefix": "roberta.",
    "transform": "lm_head.dense",
    "norm": "lm_head.layer_norm",
    "decoder": "lm_head.decoder",
    "bias": "lm_head.bias",
    "pooler": "roberta.pooler.dense",
    "heads": {
        TEXTS: _Scores("classifier.out_proj", "classifier.dense"),
        CHOICES: _Scores("classifier", "roberta.pooler.dense", dropout="hidden_dropout_prob"),
        **_BOTH,
    },
    "tokens": {"pad": 1, "bos": 0, "eos": 2},
    "head_activation": "gelu",
    "offset": True,
}
_DIALECTS = (
    _Dialect(
        "bert", "Bert", "bert.", "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder", "cls.predictions.bias", {TEXTS: _OF_BERT, CHOICES: _OF_BERT, **_BOTH},
        "bert.pooler.dense",
    ),
    _Dialect("roberta", "Roberta", sizes={"vocab_size": 50265}, **_OF_ROBERTA),
    _Dialect("xlm-roberta", "XLMRoberta", **_OF_ROBERTA),
    _Dialect(
        "distilbert", "DistilBert", "distilbert.", "vocab_transform", "vocab_layer_norm", "vocab_projector",
        "vocab_projector.bias",
        {
            TEXTS: _OF_DISTILBERT, CHOICES: _OF_DISTILBERT,
            SPANS: _Scores("qa_outputs", dropout="qa_dropout", rate=0.1),
            WORDS: _Scores("classifier", dropout="dropout"),
        },
        block=_Block(
            "transformer.layer", tuple(f"attention.{part}_lin" for part in "qkv"), "attention.out_lin",
            "sa_layer_norm", "ffn.lin1", "ffn.lin2", "output_layer_norm",
        ),
        stack=_DISTILLED, activation="activation",
    ),
    _Dialect(
        "electra", "Electra", "electra.", "generator_predictions.dense", "generator_predictions.LayerNorm",
        "generator_lm_head", "generator_lm_head.bias",
        {
            TEXTS: _Scores("classifier.out_proj", "classifier.dense", "gelu"),
            CHOICES: _Scores("classifier", "sequence_summary.summary", "gelu", "summary_last_dropout", 0.1),
            REPLACED: _Scores("discriminator_predictions.dense_prediction", dropout=""), **_BOTH,
        },
        sizes={"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}, head_activation="gelu",
        narrow=True,
    ),
)  # fmt: skip


_SUMMARY = {"summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"}
"""Keys of what ELECTRA reads a choice by."""


def _tensors(scores: _Scores) -> set[str]:
    return {f"{name}.weight" for name in (scores.layer, scores.pooler) if name}


def _read_config(dialect: _Dialect, values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
    fields = Fields(values)
    fields.only("position_embedding_type", "absolute", "no stack of ours has relative keys")
    fields.only("is_decoder", False, "an encoder of ours has no causal mask")
    fields.only("add_cross_attention", False, "an encoder of ours has no cross attention")
    stack = fields.read(dialect.stack, dialect.sizes)
    units = {unit: _tensors(scores) for unit, scores in dialect.heads.items()}
    unit = find_unit(fields, names, dialect.name, units)
    claimed = fields.claims(f"{dialect.name}ForMaskedLM")
    masked = unit is None and (f"{dialect.transform}.weight" in names or claimed)
    activation = fields.activation(dialect.activation, "gelu")
    head = HeadConfig(kind="none")
    pooler: dict[str, Any] = {"pooler": not masked and f"{dialect.pooler}.weight" in names}
    if unit is not None:
        scores = dialect.heads[unit]
        rate = stack["dropout"] if scores.rate is None else scores.rate
        head = read_label_head(fields, unit, dropout=rate, key=scores.dropout)
        if scores.pooler.startswith("sequence_summary"):
            for key, allowed in _SUMMARY.items():
                fields.only(key, allowed, "the first position passes a layer and that activation")
        pooler = {"pooler": bool(scores.pooler)}
        pooler |= {"pooler_activation": scores.activation} if scores.pooler else {}
    elif masked:
        own = dialect.head_activation
        head = HeadConfig(transform=True, bias=True, activation=None if own == activation else own)
    stack |= {"norm_eps": 1e-12, "token_types": 0} | stack
    if dialect.stack is _STACK and stack["token_types"] < 1:
        raise refusal("type_vocab_size", stack["token_types"], "theirs has a table of token types")
    stack |= {
        "activation": activation,
        "gated": False,
        "norm": "layer",
        "norm_placement": "post",
        "input_norm": True,
        "bias": True,
        "position": "learned",
    }
    tokens = fields.special_tokens(**dialect.tokens, mask=None)
    model = fields.read(_MODEL, dialect.sizes)
    if dialect.offset:
        if tokens.pad is None or model["max_seq_len"] <= tokens.pad + 1:
            rows = f"max_position_embeddings={model['max_seq_len']} rows"
            why = f"positions begin after it, in a table of {rows}"
            raise refusal("pad_token_id", tokens.pad, why)
        stack["position_offset"] = "pad"
        model["max_seq_len"] -= tokens.pad + 1
    if dialect.narrow:
        width = fields.integer("embedding_size", 128)
        stack["embedding_width"] = None if width == stack["width"] else width
    return build_config(
        **model,
        encoder=stack,
        head=head,
        tied_embeddings=masked and fields.flag("tie_word_embeddings", True),
        **pooler,
        init_scaled=False,
        special_tokens=tokens,
    )


def _write_config(dialect: _Dialect, config: ModelConfig) -> dict[str, Any]:
    stack = config.encoder or config.last_stack
    pad = {"pad_token_id": config.first_position("encoder") - 1} if dialect.offset else {}
    scores = dialect.heads.get(unit_of(config))
    return {
        **write_keys(config, _MODEL),
        **write_keys(stack, dialect.stack),
        # Theirs has the mask in the tokenizer only; this key is read back by ours.
        **write_tokens(config.special_tokens, "mask"),
        **pad,
        "max_position_embeddings": config.max_seq_len + sum(pad.values()) + len(pad),
        dialect.activation: THEIR_ACTIVATIONS[stack.activation],
        "position_embedding_type": "absolute",
        **({scores.dropout: config.head.dropout} if scores and scores.dropout else {}),
        **({"embedding_size": stack.table_width} if dialect.narrow else {}),
        **({} if config.tied_embeddings or config.head.kind != "lm" else {"tie_word_embeddings": False}),
        **write_label_names(config.head),
    }


def _weights(dialect: _Dialect, config: ModelConfig) -> list[Weight]:
    stack = config.encoder or config.last_stack
    width, block, tables = stack.width, dialect.block, f"{dialect.prefix}embeddings."
    rows = config.first_position("encoder") + config.max_seq_len
    weights = [
        table("embedding.weight", f"{tables}word_embeddings.weight", config.vocab_size),
        Weight("encoder.position.weight", ((f"{tables}position_embeddings.weight", rows),)),
        *affine("encoder.", tables, {"input_norm": {"LayerNorm": stack.table_width}}, bias=True),
    ]
    if stack.token_types:
        types = ((f"{tables}token_type_embeddings.weight", stack.token_types),)
        weights.append(Weight("encoder.token_type.weight", types))
    if stack.embedding_width is not None:
        expand = {"expand": {"embeddings_project": width}}
        weights += affine("encoder.", dialect.prefix, expand, bias=True)
    modules = {
        "attention.qkv": dict.fromkeys(block.qkv, width),
        "attention.output": {block.output: width},
        "attention_norm": {block.attention_norm: width},
        "feedforward.up": {block.up: stack.ff_width},
        "feedforward.down": {block.down: width},
        "feedforward_norm": {block.feedforward_norm: width},
    }
    for number in range(stack.layers):
        theirs = f"{dialect.prefix}{block.layers}.{number}."
        weights += affine(f"encoder.blocks.{number}.", theirs, modules, bias=True)
    scores = dialect.heads.get(unit_of(config))
    pooler = scores.pooler if scores else dialect.pooler
    if config.pooler:
        weights += affine("", "", {"pooler": {pooler: width}}, bias=True)
    if config.head.kind == "lm":
        narrow = config.head_width
        head = {"transform": {dialect.transform: narrow}, "norm": {dialect.norm: narrow}}
        weights += affine("head.", "", head, bias=True)
        weights += own_head(config, f"{dialect.decoder}.weight")
        weights.append(_head_bias(dialect, config))
    if scores is not None:
        weights += score_weights(config.head, scores.layer)
        if config.head.transform:
            transform = scores.layer.removesuffix("_prediction")
            weights += affine("head.", "", {"transform": {transform: width}}, bias=True)
    return weights


def _head_bias(dialect: _Dialect, config: ModelConfig) -> Weight:
    """Returns the bias of the scores: of an untied head its own, beside one that no model reads."""
    if config.tied_embeddings or dialect.bias == f"{dialect.decoder}.bias":
        return table("head.bias", dialect.bias, config.vocab_size)
    bias = table("head.bias", f"{dialect.decoder}.bias", config.vocab_size)
    return replace(bias, unread=(dialect.bias,))


def _architecture(dialect: _Dialect, config: ModelConfig) -> str:
    if unit := unit_of(config):
        return f"{dialect.name}{unit}"
    return f"{dialect.name}ForMaskedLM" if config.head.kind == "lm" else f"{dialect.name}Model"


FAMILIES = tuple(
    Family(
        model_type=dialect.model_type,
        read_config=partial(_read_config, dialect),
        write_config=partial(_write_config, dialect),
        architecture=partial(_architecture, dialect),
        weights=partial(_weights, dialect),
        aliases={
            f"{dialect.decoder}.weight": f"{dialect.prefix}embeddings.word_embeddings.weight",
            **({} if dialect.bias == f"{dialect.decoder}.bias" else {f"{dialect.decoder}.bias": dialect.bias}),
        },
        ignored=(
            rf"{dialect.prefix}pooler\..*", r"cls\.seq_relationship\..*",
        ),
        renames=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
        prefix=dialect.prefix,
        sizes=_SIZES[dialect.model_type],
    )
    for dialect in _DIALECTS
)  # fmt: skip
