"""ELECTRA (Clark et al. 2020): a BERT that is trained to find replaced tokens, and its generator."""

from pretrain.families.encoders.bert import BERT, BOTH, BertHeads, Scores, bert_family
from pretrain.families.label_names import CHOICES, REPLACED, TEXTS

_ELECTRA = BERT._replace(ends=BERT.ends | {"family": "electra"})
"""Clark et al. 2020, 3 and appendix A: a BERT but for the width of the smallest one's tables."""
_SIZES = {
    # Clark et al. 2020, table 6.
    "electra-small": _ELECTRA.size(12, 256, 4, 1024, of=(30522, 13_546_682), embedding_width=128),
    "electra-base": _ELECTRA.size(12, 768, 12, 3072, of=(30522, 109_514_298)),
    "electra-large": _ELECTRA.size(24, 1024, 16, 4096, of=(30522, 335_174_458)),
    "electra-tiny": _ELECTRA.size(2, 64, 4, 256, max_seq_len=128, embedding_width=32),
}  # fmt: skip
_HEADS = BertHeads(
    name="Electra", prefix="electra.", transform="generator_predictions.dense",
    norm="generator_predictions.LayerNorm", decoder="generator_lm_head",
    bias="generator_lm_head.bias",
    heads={
        TEXTS: Scores("classifier.out_proj", "classifier.dense", "gelu"),
        CHOICES: Scores("classifier", "sequence_summary.summary", "gelu", "summary_last_dropout", 0.1),
        REPLACED: Scores("discriminator_predictions.dense_prediction", dropout=""), **BOTH,
    },
    activation="gelu", narrow=True,
)  # fmt: skip
_DEFAULTS = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}

FAMILIES = (bert_family("electra", _HEADS, _SIZES, defaults=_DEFAULTS),)
