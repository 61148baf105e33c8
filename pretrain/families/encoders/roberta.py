"""RoBERTa (Liu et al. 2019), XLM-R (Conneau et al. 2020), CamemBERT and others: a BERT with other positions.

They begin after the padding's id. CamemBERT (Martin et al. 2020) and data2vec (Baevski et al. 2022) differ in
names; XLM-R XL (Goyal et al. 2021) and what Wettig et al. 2023 trained have norms before sub-layers.
"""

from pretrain.families.encoders.bert import BERT, BLOCK, BOTH, BUILT_IN, BertHeads, Scores, bert_family
from pretrain.families.label_names import CHOICES, TEXTS
from pretrain.families.sizes import Architecture

_ROBERTA = Architecture(
    ("encoder",),
    BERT.stack | {"norm_eps": 1e-5, "token_types": 1, "position_offset": "pad"},
    BERT.ends,
)
"""Liu et al. 2019, as released: positions begin after the id of padding, 1."""
_XLM_ROBERTA = _ROBERTA._replace(ends=_ROBERTA.ends | {"family": "xlm-roberta"})
"""Conneau et al. 2020, 3, as released."""
_CAMEMBERT = _ROBERTA._replace(ends=_ROBERTA.ends | {"family": "camembert"})
_DATA2VEC = _ROBERTA._replace(ends=_ROBERTA.ends | {"family": "data2vec-text"})
_XL = _ROBERTA._replace(stack=_ROBERTA.stack | {"norm_placement": "pre", "input_norm": False})
_PRE = _ROBERTA._replace(stack=_ROBERTA.stack | {"norm_placement": "pre", "input_norm": "both"})
_SIZES = {
    # Liu et al. 2019, 4.1; Conneau et al. 2020, 3.
    "roberta-base": _ROBERTA.size(12, 768, 12, 3072, of=(50265, 124_697_433)),
    "roberta-large": _ROBERTA.size(24, 1024, 16, 4096, of=(50265, 355_412_057)),
    "roberta-tiny": _ROBERTA.size(2, 64, 4, 256, max_seq_len=128),
}
_XLM_SIZES = {
    "xlm-roberta-base": _XLM_ROBERTA.size(12, 768, 12, 3072, of=(250002, 278_295_186)),
    "xlm-roberta-large": _XLM_ROBERTA.size(24, 1024, 16, 4096, of=(250002, 560_142_482)),
    "xlm-roberta-tiny": _XLM_ROBERTA.size(2, 64, 4, 256, max_seq_len=128),
}
_CAMEMBERT_SIZES = {
    # Martin et al. 2020, 4.2.
    "camembert-base": _CAMEMBERT.size(12, 768, 12, 3072, of=(32005, 110_655_493)),
    "camembert-tiny": _CAMEMBERT.size(2, 64, 4, 256, max_seq_len=128),
}
_DATA2VEC_SIZES = {
    # Baevski et al. 2022, 4.3.
    "data2vec-text-base": _DATA2VEC.size(12, 768, 12, 3072, of=(50265, 124_697_433)),
    "data2vec-text-tiny": _DATA2VEC.size(2, 64, 4, 256, max_seq_len=128),
}
_XL_SIZES = {
    # Goyal et al. 2021, table 1.
    "xlm-roberta-xl": _XL.size(36, 2560, 32, 10240, of=(250880, 3_482_741_760)),
    "xlm-roberta-xl-tiny": _XL.size(2, 64, 4, 256, max_seq_len=128),
}
_PRE_SIZES = {
    # Wettig et al. 2023, 2.
    "roberta-prenorm-large": _PRE.size(24, 1024, 16, 4096, of=(50265, 355_414_105)),
    "roberta-prenorm-tiny": _PRE.size(2, 64, 4, 256, max_seq_len=128),
}
_TOKENS = {"pad": 1, "bos": 0, "eos": 2, "mask": None}


def _heads(name: str, prefix: str = "roberta.") -> BertHeads:
    return BertHeads(
        name=name, prefix=prefix, transform="lm_head.dense", norm="lm_head.layer_norm",
        decoder="lm_head.decoder", bias="lm_head.bias",
        heads={
            TEXTS: Scores("classifier.out_proj", "classifier.dense"),
            CHOICES: Scores("classifier", f"{prefix}pooler.dense", dropout="hidden_dropout_prob"),
            **BOTH,
        },
        pooler=f"{prefix}pooler.dense", activation="gelu", offset=True,
    )  # fmt: skip


_DEFAULTS = {"vocab_size": 50265}
_XL_BLOCK = BLOCK | {"attention_norm": ("attention.self_attn_layer_norm",), "feedforward_norm": ("LayerNorm",)}
_PRE_BLOCK = BLOCK | {"attention_norm": ("attention.LayerNorm",), "feedforward_norm": ("intermediate.LayerNorm",)}
_BEFORE = BUILT_IN | {"norm_placement": "pre"}
FAMILIES = (
    bert_family("roberta", _heads("Roberta"), _SIZES, tokens=_TOKENS, defaults=_DEFAULTS),
    bert_family("xlm-roberta", _heads("XLMRoberta"), _XLM_SIZES, tokens=_TOKENS),
    bert_family("camembert", _heads("Camembert"), _CAMEMBERT_SIZES, tokens=_TOKENS),
    bert_family("data2vec-text", _heads("Data2VecText", "data2vec_text."), _DATA2VEC_SIZES, tokens=_TOKENS),
    bert_family(
        "xlm-roberta-xl", _heads("XLMRobertaXL"), _XL_SIZES, tokens=_TOKENS, block=_XL_BLOCK,
        last_norm="encoder.LayerNorm", built_in=_BEFORE | {"input_norm": False},
        defaults={
            "vocab_size": 250880, "hidden_size": 2560, "num_hidden_layers": 36,
            "num_attention_heads": 32, "intermediate_size": 10240, "max_position_embeddings": 514,
            "type_vocab_size": 1, "layer_norm_eps": 1e-5,
        },
    ),
    bert_family(
        "roberta-prelayernorm", _heads("RobertaPreLayerNorm", "roberta_prelayernorm."), _PRE_SIZES,
        tokens=_TOKENS, block=_PRE_BLOCK, last_norm="LayerNorm", defaults=_DEFAULTS,
        built_in=_BEFORE | {"input_norm": "both"},
    ),
)  # fmt: skip
