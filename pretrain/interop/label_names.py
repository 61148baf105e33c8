"""Heads of classifiers in Hugging Face's terms: names of labels, and the labelled unit.

    ...ForSequenceClassification    a label for a text
    ...ForTokenClassification       a label for a word, at its first token
    ...ForImageClassification       a label for an image

Theirs always have a bias. Only mutually exclusive labels are supported: a regression (one score)
and labels of which several may be right are refused.
"""

from pathlib import Path
from typing import Any

from pretrain.config.model import HeadConfig
from pretrain.interop.family import Weight, affine
from pretrain.interop.fields import CONFIG, Fields, read_object, refusal

TEXTS, WORDS = "ForSequenceClassification", "ForTokenClassification"
IMAGES = "ForImageClassification"
_LAYER = "classifier"
_SINGLE = "single_label_classification"


def find_classifier(fields: Fields, names: frozenset[str], prefix: str, pooler: str = "") -> str | None:
    """Returns the labelled unit, `TEXTS` or `WORDS`; None: the model is no classifier.

    Without `architectures`, the pooler of a family that has one for texts decides. Raises
    ConfigError for a class that uses a layer of this name for something else.
    """
    for kind in (TEXTS, WORDS):
        if fields.claims(prefix + kind):
            return kind
    if f"{_LAYER}.weight" not in names:
        return None
    if claimed := fields.values.get("architectures"):
        known = f"of classes with a classifier, {prefix}{TEXTS} and {WORDS} are known"
        raise refusal("architectures", claimed, known)
    return WORDS if pooler and pooler not in names else TEXTS


def read_label_head(fields: Fields, *, dropout: float, **options: bool) -> HeadConfig:
    """Returns the head of a classifier, with further `options` of `HeadConfig`.

    `dropout` is the default of `classifier_dropout`. Raises ConfigError where labels are not
    mutually exclusive, or have no names.
    """
    if (problem := fields.values.get("problem_type")) not in (None, _SINGLE):
        why = f"only {_SINGLE!r} can be represented: of all labels one is right"
        raise refusal("problem_type", problem, why)
    # Without names transformers numbers two labels, or `num_labels`.
    listed = fields.section("id2label")
    default = range(0 if listed else fields.integer("num_labels", 2))
    names = [listed.get(str(number)) for number in range(len(listed))]
    labels = [name for name in names if isinstance(name, str) and name]
    if len(set(labels)) < len(names):
        raise refusal("id2label", listed, "must be a name for each number from 0 on, without duplicates")
    labels += [f"LABEL_{number}" for number in default]
    if len(labels) < 2:
        why = "one score is a regression, not a choice of labels"
        raise refusal("id2label", fields.values.get("id2label"), why)
    given = fields.values.get("classifier_dropout")
    rate = dropout if given is None else fields.number("classifier_dropout")
    return HeadConfig(kind="labels", bias=True, labels=labels, dropout=rate, **options)


def write_label_names(head: HeadConfig) -> dict[str, Any]:
    """Returns the keys of config.json that name labels; none for another head."""
    if head.kind != "labels":
        return {}
    numbers = {name: number for number, name in enumerate(head.labels)}
    return {"id2label": {str(number): name for name, number in numbers.items()}, "label2id": numbers}


def label_weights(head: HeadConfig) -> list[Weight]:
    """Returns weight and bias of a head over labels."""
    return affine("", "", {"head": {_LAYER: len(head.labels)}}, bias=True)


def labelled_by(folder: Path) -> str | None:
    """Returns the unit that a Hugging Face folder labels, `TEXTS` or `WORDS`; None: no unit."""
    listed = read_object(folder / CONFIG).get("architectures")
    for kind in (TEXTS, WORDS):
        if isinstance(listed, list) and any(str(name).endswith(kind) for name in listed):
            return kind
    return None
