"""Heads of classifiers, in Hugging Face's terms: the names of labels, and whether a text has one or each of its words.

    ...ForSequenceClassification    a label for a text
    ...ForTokenClassification       a label for a word, at its first token

Theirs always have a bias. Only scores of which one is right are read: a regression (one score) and labels that do not
exclude each other are refused.
"""

from pathlib import Path
from typing import Any

from pretrain.config.model import HeadConfig
from pretrain.interop.family import Weight, affine
from pretrain.interop.fields import CONFIG, Fields, read_object, refusal

TEXTS, WORDS = "ForSequenceClassification", "ForTokenClassification"
_LAYER = "classifier"
_SINGLE = "single_label_classification"


def find_classifier(fields: Fields, names: frozenset[str], prefix: str, pooler: str = "") -> str | None:
    """Returns what is labelled, `TEXTS` or `WORDS`; None: it is no classifier.

    Where `architectures` says nothing, a family that has a pooler for texts tells it by that.

    Args:
        fields: Fields of config.json.
        names: Names of the tensors.
        prefix: What names of the family's classes begin with.
        pooler: A tensor of its pooler; empty: it has none.

    Raises:
        ConfigError: A class that has a layer of this name for something else.
    """
    for kind in (TEXTS, WORDS):
        if fields.claims(prefix + kind):
            return kind
    if f"{_LAYER}.weight" not in names:
        return None
    if claimed := fields.values.get("architectures"):
        raise refusal("architectures", claimed, f"of classes with a classifier, {prefix}{TEXTS} and {WORDS} are known")
    return WORDS if pooler and pooler not in names else TEXTS


def read_label_head(fields: Fields, *, dropout: float, mean: bool = False, transform: bool = False) -> HeadConfig:
    """Returns the head of a classifier.

    Args:
        fields: Fields of config.json.
        dropout: Where `classifier_dropout` is null or missing.
        mean: Pooling by the mean, as in `HeadConfig`, like `transform`.
        transform: See there.

    Raises:
        ConfigError: Labels are not mutually exclusive, or have no names.
    """
    if (problem := fields.values.get("problem_type")) not in (None, _SINGLE):
        raise refusal("problem_type", problem, f"only {_SINGLE!r} can be represented: of all labels one is right")
    labels = _read_names(fields)
    if len(labels) < 2:
        raise refusal("id2label", fields.values.get("id2label"), "one score is a regression, not a choice of labels")
    given = fields.values.get("classifier_dropout")
    rate = dropout if given is None else fields.number("classifier_dropout")
    return HeadConfig(kind="labels", bias=True, labels=labels, dropout=rate, mean=mean, transform=transform)


def _read_names(fields: Fields) -> list[str]:
    """Returns the names by number; where there are none transformers numbers two, or `num_labels`."""
    found = fields.section("id2label")
    if not found:
        return [f"LABEL_{number}" for number in range(fields.integer("num_labels", 2))]
    names = [found.get(str(number)) for number in range(len(found))]
    known = [name for name in names if isinstance(name, str) and name]
    if len(set(known)) < len(names):
        raise refusal("id2label", found, "must be a name for each number from 0 on, no two of them the same")
    return known


def write_label_names(head: HeadConfig) -> dict[str, Any]:
    """Returns the keys of config.json that name labels; none for another head."""
    if head.kind != "labels":
        return {}
    names = {str(number): name for number, name in enumerate(head.labels)}
    return {"id2label": names, "label2id": {name: number for number, name in enumerate(head.labels)}}


def label_weights(head: HeadConfig) -> list[Weight]:
    """Returns the scores of labels."""
    return affine("head", (_LAYER, len(head.labels)), bias=True)


def labelled_by(folder: Path) -> str | None:
    """Returns what the class in a Hugging Face folder labels, `TEXTS` or `WORDS`; None: nothing.

    Raises:
        CheckpointError: config.json cannot be read.
    """
    listed = read_object(folder / CONFIG).get("architectures")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    return next((kind for kind in (TEXTS, WORDS) if any(name.endswith(kind) for name in names)), None)
