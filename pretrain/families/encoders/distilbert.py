"""DistilBERT (Sanh et al. 2019): a BERT of half as many layers, without token types."""

from pretrain.families.config_json import Keys
from pretrain.families.encoders.bert import BERT, BUILT_IN, BertHeads, Scores, bert_family
from pretrain.families.label_names import CHOICES, SPANS, TEXTS, WORDS

_DISTILBERT = BERT._replace(stack=BERT.stack | {"token_types": 0})
"""Sanh et al. 2019, 3."""
_SIZES = {
    # Sanh et al. 2019, 3.
    "distilbert-base": _DISTILBERT.size(6, 768, 12, 3072, of=(30522, 66_985_530)),
    "distilbert-tiny": _DISTILBERT.size(2, 64, 4, 256, max_seq_len=128),
}
_KEYS: Keys = {
    "n_layers": ("layers", 6),
    "dim": ("width", 768),
    "n_heads": ("heads", 12),
    "hidden_dim": ("ff_width", 3072),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.1),
}
_BLOCK = {
    "attention.qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "attention.output": ("attention.out_lin",),
    "attention_norm": ("sa_layer_norm",),
    "feedforward.up": ("ffn.lin1",),
    "feedforward.down": ("ffn.lin2",),
    "feedforward_norm": ("output_layer_norm",),
}
_POOLED = Scores("classifier", "pre_classifier", "relu", "seq_classif_dropout", 0.2)
_HEADS = BertHeads(
    name="DistilBert", prefix="distilbert.", transform="vocab_transform", norm="vocab_layer_norm",
    decoder="vocab_projector", bias="vocab_projector.bias",
    heads={
        TEXTS: _POOLED, CHOICES: _POOLED,
        SPANS: Scores("qa_outputs", dropout="qa_dropout", rate=0.1),
        WORDS: Scores("classifier", dropout="dropout"),
    },
    typed=False,
)  # fmt: skip

FAMILIES = (
    bert_family(
        "distilbert", _HEADS, _SIZES, keys=_KEYS, block=_BLOCK, layers="transformer.layer.{}.",
        built_in=BUILT_IN | {"norm_eps": 1e-12, "token_types": 0}, activation=("activation", "gelu"),
    ),
)  # fmt: skip
