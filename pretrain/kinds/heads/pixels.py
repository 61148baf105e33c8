"""Pixels of each patch (He et al. 2022)."""

from pretrain.kinds.head import HeadRecord

PIXELS = HeadRecord(
    restores=True,
    settings=("transform", "bias"),
    chooses=False,
    targets="hidden patches",
)
