"""RoBERTa (Liu et al. 2019) and XLM-R (Conneau et al. 2020): a BERT whose positions begin after its padding's id."""

from pretrain.families.encoders.bert import BERT, BOTH, BertHeads, Scores, bert_family
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
_TOKENS = {"pad": 1, "bos": 0, "eos": 2, "mask": None}


def _heads(name: str) -> BertHeads:
    return BertHeads(
        name=name, prefix="roberta.", transform="lm_head.dense", norm="lm_head.layer_norm",
        decoder="lm_head.decoder", bias="lm_head.bias",
        heads={
            TEXTS: Scores("classifier.out_proj", "classifier.dense"),
            CHOICES: Scores("classifier", "roberta.pooler.dense", dropout="hidden_dropout_prob"),
            **BOTH,
        },
        pooler="roberta.pooler.dense", activation="gelu", offset=True,
    )  # fmt: skip


_DEFAULTS = {"vocab_size": 50265}
FAMILIES = (
    bert_family("roberta", _heads("Roberta"), _SIZES, tokens=_TOKENS, defaults=_DEFAULTS),
    bert_family("xlm-roberta", _heads("XLMRoberta"), _XLM_SIZES, tokens=_TOKENS),
)
