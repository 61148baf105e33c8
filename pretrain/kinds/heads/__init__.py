"""Heads by `model.head.kind`. A new one: a file with its record, and a line here."""

from pretrain.kinds.head import HeadRecord
from pretrain.kinds.heads.choices import CHOICES
from pretrain.kinds.heads.labels import LABELS
from pretrain.kinds.heads.lm import LM
from pretrain.kinds.heads.none import NONE
from pretrain.kinds.heads.pixels import PIXELS
from pretrain.kinds.heads.replaced import REPLACED
from pretrain.kinds.heads.spans import SPANS
from pretrain.kinds.heads.vectors import VECTORS

HEADS: dict[str, HeadRecord] = {
    "lm": LM,
    "labels": LABELS,
    "spans": SPANS,
    "choices": CHOICES,
    "replaced": REPLACED,
    "pixels": PIXELS,
    "vectors": VECTORS,
    "none": NONE,
}

__all__ = ["HEADS", "HeadRecord"]
