"""Megatron-BERT (Shoeybi et al. 2019): a BERT with norms before sub-layers, and none over its embeddings."""

from pretrain.families.encoders.bert import BERT, BLOCK, BUILT_IN, BertHeads, Scores, bert_family
from pretrain.families.label_names import CHOICES, SPANS, TEXTS, WORDS

_MEGATRON = BERT._replace(stack=BERT.stack | {"norm_placement": "pre", "input_norm": False})
_SIZES = {
    # Shoeybi et al. 2019, 5.3, as released.
    "megatron-bert-345m": _MEGATRON.size(24, 1024, 16, 4096, of=(29056, 333_671_808)),
    "megatron-bert-tiny": _MEGATRON.size(2, 64, 4, 256, max_seq_len=128),
}
_POOLED = Scores("classifier", "bert.pooler.dense", dropout="hidden_dropout_prob")
_HEADS = BertHeads(
    name="MegatronBert", prefix="bert.", transform="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm", decoder="cls.predictions.decoder",
    bias="cls.predictions.bias",
    heads={
        TEXTS: _POOLED, CHOICES: _POOLED, SPANS: Scores("qa_outputs", dropout=""),
        WORDS: Scores("classifier", dropout="hidden_dropout_prob"),
    },
    pooler="bert.pooler.dense",
)  # fmt: skip
_DEFAULTS = {
    "vocab_size": 29056, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096,
}  # fmt: skip

FAMILIES = (
    bert_family(
        "megatron-bert", _HEADS, _SIZES, last_norm="encoder.ln", defaults=_DEFAULTS,
        built_in=BUILT_IN | {"norm_placement": "pre", "input_norm": False},
        block=BLOCK | {"attention_norm": ("attention.ln",), "feedforward_norm": ("ln",)},
    ),
)  # fmt: skip
