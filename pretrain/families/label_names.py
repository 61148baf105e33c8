"""Heads of Hugging Face's classes that score something else than a vocabulary, by what is scored.

    ...ForSequenceClassification    a label for a text, of decoders too         head.kind labels
    ...ForTokenClassification       a label for a word, at its first token      labels
    ...ForImageClassification       a label for an image                        labels
    ...ForQuestionAnswering         where an answer is, of decoders too         spans
    ...ForMultipleChoice            a score for each answer                     choices
    ...ForPreTraining (ELECTRA)     whether a token was replaced                replaced

Theirs always have a bias, but labels of decoders. Only mutually exclusive labels are supported: a
regression (one score) and labels of which several may be right are refused.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.families.config_json import Fields, build_config, refusal
from pretrain.families.family import Family, Weight, affine
from pretrain.kinds.heads import HEADS

TEXTS, WORDS = "ForSequenceClassification", "ForTokenClassification"
IMAGES = "ForImageClassification"
SPANS = HEADS["spans"].hub_class
CHOICES = HEADS["choices"].hub_class
REPLACED = HEADS["replaced"].hub_class
_KINDS = {record.hub_class: kind for kind, record in HEADS.items() if record.hub_class}
"""Classes whose head is not of labels, and its kind."""
_FURTHER = (
    *("ForNextSentencePrediction", "ForMaskedImageModeling", "DoubleHeadsModel"),
    "EncoderModel",
)
"""Classes with a head that no model of ours has, or without a stack."""
_LAYER, _SCORE, _ANSWER = "classifier", "score", "qa_outputs"
_SINGLE = "single_label_classification"


def find_unit(fields: Fields, names: frozenset[str], prefix: str, units: Mapping[str, Collection[str]]) -> str | None:
    """Returns the class, without `prefix`, of a model that scores no vocabulary; None: it does.

    `units` are the tensors of each class above its stack. Where config.json does not name a class,
    it is the first whose tensors are all there. Raises ConfigError where it names one that is none
    of these, although it has such tensors.
    """
    for unit in units:
        if fields.claims(prefix + unit):
            return unit
    fitting = (unit for unit, tensors in units.items() if tensors and names.issuperset(tensors))
    match = next(fitting, None)
    if match and (claimed := fields.values.get("architectures")):
        listed = f"{prefix}{', '.join(units)}"
        known = f"of classes with a head over something else than a vocabulary, {listed} are known"
        raise refusal("architectures", claimed, known)
    return match


def check_head(values: dict[str, Any], config: ModelConfig) -> None:
    """Checks that the class of a config.json scores what its model does.

    Raises: ConfigError: It labels texts, say, which our models of this family do not.
    """
    listed = Fields(values).classes
    units = (TEXTS, WORDS, IMAGES, SPANS, CHOICES, *_FURTHER)
    if config.head.record.scales and any(name.endswith(units) for name in listed):
        lack = "both stacks" if listed[0].endswith("EncoderModel") else "no such head"
        why = f"our models of {values.get('model_type')} have {lack}"
        raise refusal("architectures", listed, why, fix="use the model that it was fine-tuned from")


def unit_of(config: ModelConfig) -> str:
    """Returns the class, without its prefix, of a model of text; empty: it scores ids or nothing."""
    if config.head.record.names_labels:
        return TEXTS if config.pooler or config.decoder else WORDS
    return config.head.record.hub_class


def read_label_head(
    fields: Fields,
    unit: str = TEXTS,
    *,
    dropout: float,
    key: str = "classifier_dropout",
    transform: bool = False,
    mean: bool = False,
) -> HeadConfig:
    """Returns the head of a class; `transform` and `mean` as in `HeadConfig`.

    `dropout` is the default of `key`; without a key there is none. Raises ConfigError where labels
    are not mutually exclusive, or have no names.
    """
    rate = dropout if not key or fields.values.get(key) is None else fields.number(key)
    if unit in _KINDS:
        if unit == SPANS and len(names := fields.section("id2label")) not in (0, 2):
            why = "a token needs two scores, of a beginning and of an end"
            raise refusal("id2label", names, why)
        return HeadConfig(
            kind=_KINDS[unit], bias=True, dropout=rate if key else 0.0, transform=transform or unit == REPLACED
        )
    labels = _read_labels(fields)
    return HeadConfig(kind="labels", bias=True, labels=labels, dropout=rate, transform=transform, mean=mean)


def _read_labels(fields: Fields) -> list[str]:
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
    return labels


def with_heads(family: Family, prefix: str | None) -> Family:
    """Returns a family of decoders that has `...ForSequenceClassification` besides its own classes.

    A text is labelled by its last token; the scores, `score.weight`, have no bias. `prefix` is that
    of the stack in `...ForQuestionAnswering`, where scores are `qa_outputs`; None: no such class.
    """
    layers = {TEXTS: _SCORE} | ({} if prefix is None else {SPANS: _ANSWER})

    def read(values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
        claimed = Fields(values).classes
        config = family.read_config(values, names)
        for unit, layer in layers.items():
            is_stored = not claimed and f"{layer}.weight" in names
            if is_stored or any(name.endswith(unit) for name in claimed):
                # Two scores, for any `id2label`.
                head = HeadConfig(kind="spans", bias=True)
                if unit == TEXTS:
                    head = HeadConfig(kind="labels", labels=_read_labels(Fields(values)))
                changed = {"head": head, "tied_embeddings": False}
                return build_config(**config.model_dump() | changed)
        return config

    def weights(config: ModelConfig) -> list[Weight]:
        layer = layers.get(unit_of(config))
        scores = {"head": {layer: config.head.num_scores}} if layer else {}
        return family.weights(config) + affine("", "", scores, bias=config.head.bias)

    def architecture(config: ModelConfig) -> str:
        name = family.architecture(config)
        unit = unit_of(config)
        return f"{name.removesuffix('Model')}{unit}" if unit in layers else name

    renamed = {} if prefix in (None, family.prefix) else {"spans": str(prefix)}
    renames = [(f"^{re.escape(name)}", family.prefix) for name in renamed.values()]
    return replace(
        family,
        read_config=read,
        write_config=lambda config: family.write_config(config) | write_label_names(config.head),
        weights=weights,
        architecture=architecture,
        renames=(*family.renames, *renames),
        written=family.written | renamed,
    )


def write_label_names(head: HeadConfig) -> dict[str, Any]:
    """Returns the keys of config.json that name labels; none for another head."""
    if not head.record.names_labels:
        return {}
    numbers = {name: number for number, name in enumerate(head.labels)}
    return {"id2label": {str(number): name for name, number in numbers.items()}, "label2id": numbers}


def score_weights(head: HeadConfig, layer: str = _LAYER) -> list[Weight]:
    """Returns weight and bias of a head that scores no ids, of this name in theirs."""
    return affine("", "", {"head": {layer: head.num_scores}}, bias=True)
