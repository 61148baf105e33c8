"""Objectives by `objective.kind`. A new one: a file with its record, and a line here."""

from pretrain.kinds.heads import HEADS
from pretrain.kinds.objective import Objective
from pretrain.kinds.objectives.answers import ANSWERS
from pretrain.kinds.objectives.captions import CAPTIONS
from pretrain.kinds.objectives.causal import CAUSAL
from pretrain.kinds.objectives.choices import CHOICES
from pretrain.kinds.objectives.classify import CLASSIFY
from pretrain.kinds.objectives.contrastive import CONTRASTIVE
from pretrain.kinds.objectives.dpo import DPO, KTO
from pretrain.kinds.objectives.fim import FIM
from pretrain.kinds.objectives.images import IMAGES
from pretrain.kinds.objectives.masked import MASKED
from pretrain.kinds.objectives.masked_patches import MASKED_PATCHES
from pretrain.kinds.objectives.prefix import PREFIX
from pretrain.kinds.objectives.replaced import REPLACED
from pretrain.kinds.objectives.seq2seq import SEQ2SEQ
from pretrain.kinds.objectives.span import SPAN
from pretrain.kinds.objectives.supervised import SUPERVISED
from pretrain.kinds.objectives.tag import TAG
from pretrain.kinds.objectives.ul2 import UL2

OBJECTIVES: dict[str, Objective] = {
    "causal": CAUSAL,
    "masked": MASKED,
    "replaced": REPLACED,
    "span": SPAN,
    "prefix": PREFIX,
    "ul2": UL2,
    "fim": FIM,
    "seq2seq": SEQ2SEQ,
    "supervised": SUPERVISED,
    "classify": CLASSIFY,
    "tag": TAG,
    "answers": ANSWERS,
    "choices": CHOICES,
    "images": IMAGES,
    "masked_patches": MASKED_PATCHES,
    "captions": CAPTIONS,
    "dpo": DPO,
    "kto": KTO,
    "contrastive": CONTRASTIVE,
}
"""Modules under `extend` may add entries. Of those that fit a model or its data, the first is the usual one."""

_COUNTS = [head.counted for head in HEADS.values()] + [record.counted for record in OBJECTIVES.values()]
TARGET_COUNTS = tuple(dict.fromkeys(filter(None, _COUNTS)))
"""Metrics that count targets; a run logs one of them. Pixels are counted by patches, as `tokens`."""


def objective_of_data(layout: str) -> str:
    """Returns the usual objective of data: the first that is for them."""
    return next(name for name, record in OBJECTIVES.items() if record.data[0] == layout)


def objective_of_model(shape: str, head: str, reads: str) -> str:
    """Returns the usual objective of a model: the first that fits it and takes documents as they are.

    Where none fits, the first that reads what the model reads.
    """
    reading = {name: record for name, record in OBJECTIVES.items() if record.reads == reads}
    fitting = [name for name, record in reading.items() if record.head == head and shape in record.shapes]
    return next((name for name in fitting if not reading[name].whole_rows), next(iter(reading)))


__all__ = ["OBJECTIVES", "TARGET_COUNTS", "Objective", "objective_of_data", "objective_of_model"]
