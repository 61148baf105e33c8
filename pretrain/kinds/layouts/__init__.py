"""Layouts of data by `kind` of `pretrain prepare`. A new one: a file with its record, and a line here."""

from pretrain.kinds.layout import Layout
from pretrain.kinds.layouts.answers import ANSWERS
from pretrain.kinds.layouts.captions import CAPTIONS
from pretrain.kinds.layouts.choices import CHOICES
from pretrain.kinds.layouts.classes import CLASSES
from pretrain.kinds.layouts.feedback import FEEDBACK
from pretrain.kinds.layouts.images import IMAGES
from pretrain.kinds.layouts.pairs import PAIRS
from pretrain.kinds.layouts.preferences import PREFERENCES
from pretrain.kinds.layouts.records import RECORDS
from pretrain.kinds.layouts.tags import TAGS
from pretrain.kinds.layouts.text import TEXT
from pretrain.kinds.layouts.triples import TRIPLES

LAYOUTS: dict[str, Layout] = {
    "text": TEXT,
    "pairs": PAIRS,
    "records": RECORDS,
    "preferences": PREFERENCES,
    "feedback": FEEDBACK,
    "classes": CLASSES,
    "tags": TAGS,
    "answers": ANSWERS,
    "choices": CHOICES,
    "triples": TRIPLES,
    "images": IMAGES,
    "captions": CAPTIONS,
}
"""By the name in the index. Images with captions are prepared as images, and get their name there."""

__all__ = ["LAYOUTS", "Layout"]
