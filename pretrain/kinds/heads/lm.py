"""Scores of the vocabulary."""

from pretrain.kinds.head import HeadRecord

LM = HeadRecord(
    scores_words=True,
    settings=("transform", "bias", "scaled", "scale", "soft_cap"),
    scales=True,
    cut=True,
)
