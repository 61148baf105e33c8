"""Scores of labels."""

from pretrain.kinds.head import HeadRecord

LABELS = HeadRecord(
    names_labels=True,
    summarizes=True,
    averages=True,
    settings=("transform", "bias", "mean", "labels"),
    stacks=("encoder", "decoder"),
    fine_tuned=True,
    cut=True,
    counted="labels",
    targets="labels",
)
