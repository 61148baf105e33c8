"""Scores of classifiers are scikit-learn's; intervals hold what they promise; differences are told from chance."""

import json

import numpy as np
import pytest
from sklearn import metrics

from pretrain.errors import DataError
from pretrain.evaluation.bootstrap import wilson_interval
from pretrain.evaluation.label_scores import SCORES, Answers, compare_labels, score_labels

NAMES = ["no", "yes", "maybe", "never said"]


def answers_of(seed=0, *, documents=200, words=1, right=0.7, labels=3):
    """Documents of some words each, with a share of right answers."""
    rng = np.random.default_rng(seed)
    count = documents * words
    gold = rng.choice(labels, count, p=[0.6, 0.3, 0.1][:labels])
    predicted = np.where(rng.random(count) < right, gold, rng.integers(0, labels, count))
    return Answers(gold, predicted, np.repeat(np.arange(documents), words), rng.random(count))


@pytest.mark.parametrize("words", [1, 5])
def test_scores_are_those_of_scikit_learn(words):
    answers = answers_of(words=words)
    found = score_labels(answers, NAMES, 100)
    gold, predicted = answers.gold, answers.predicted
    assert found.scores["accuracy"].value == pytest.approx(metrics.accuracy_score(gold, predicted), abs=1e-12)
    assert found.scores["macro_f1"].value == pytest.approx(
        metrics.f1_score(gold, predicted, average="macro"), abs=1e-12
    )
    assert found.scores["matthews"].value == pytest.approx(metrics.matthews_corrcoef(gold, predicted), abs=1e-12)
    expected = metrics.precision_recall_fscore_support(gold, predicted, labels=range(4), zero_division=0)
    ours = [(one.precision, one.recall, one.f1, one.support) for one in found.classes]
    np.testing.assert_allclose(np.array(ours).T, np.array(expected, dtype=float), atol=1e-12)
    assert found.confusion.tolist() == metrics.confusion_matrix(gold, predicted, labels=range(4)).tolist()
    assert found.num_documents == 200


@pytest.mark.parametrize("answer", [0, 2])
def test_a_model_that_says_one_thing_only_has_no_correlation(answer):
    answers = answers_of()
    constant = Answers(answers.gold, np.full_like(answers.gold, answer), answers.document, answers.nll)
    found = score_labels(constant, NAMES, 100)
    assert found.scores["matthews"].value == 0
    expected = metrics.f1_score(constant.gold, constant.predicted, average="macro", zero_division=0)
    assert found.scores["macro_f1"].value == pytest.approx(expected, abs=1e-12)


def test_the_interval_of_accuracy_is_wilsons_for_documents_and_of_documents_for_words():
    one, several = (score_labels(answers_of(words=words), NAMES, 200).scores["accuracy"] for words in (1, 5))
    assert (one.method, several.method) == ("wilson", "bootstrap")
    assert one.low < one.value < one.high and several.low < several.value < several.high


def test_wilsons_interval_is_that_of_the_literature_and_right_at_the_ends():
    found = wilson_interval(81, 263)  # Newcombe 1998, table I
    assert (round(found.low, 4), round(found.high, 4)) == (0.2553, 0.3662)
    assert wilson_interval(0, 20).low == 0 and round(wilson_interval(0, 20).high, 4) == 0.1611
    assert wilson_interval(20, 20).high == 1 and wilson_interval(20, 20).low > 0.8


def test_words_of_a_document_are_drawn_together():
    """Documents that are all right or all wrong: an interval over words would be far too narrow."""
    rng = np.random.default_rng(1)
    right = np.repeat(rng.random(100) < 0.5, 50)
    answers = Answers(np.zeros(5000, int), np.where(right, 0, 1), np.repeat(np.arange(100), 50), np.zeros(5000))
    found = score_labels(answers, NAMES[:2], 500).scores["accuracy"]
    # A share of 0.5 among 100 has a standard error of 0.05; among 5,000, of 0.007.
    assert 0.15 < found.high - found.low < 0.25


def test_a_better_classifier_is_told_from_chance_and_an_equal_one_is_not():
    worse, better = answers_of(right=0.5), answers_of(right=0.9)
    found = compare_labels(worse, better, 3, 500)
    assert found.keys() == set(SCORES)
    for name, difference in found.items():
        mine, its = (score_labels(one, NAMES[:3], 100).scores[name].value for one in (better, worse))
        assert difference.value == pytest.approx(mine - its, abs=1e-12)
        assert 0 < difference.low < difference.high and difference.p_value < 0.01
        assert (difference.num_units, difference.unit) == (200, "documents")
    for difference in compare_labels(worse, worse, 3, 100).values():
        assert (difference.value, difference.p_value) == (0, 1)


def test_sources_are_joined_document_by_document():
    first, second = answers_of(0, words=2), answers_of(1, documents=50, words=2)
    both = first + second
    assert both.num_documents == 250
    assert np.array_equal(np.unique(both.document), np.arange(250))


def test_a_few_documents_have_scores_and_no_comparison():
    answers = answers_of(documents=4)
    found = score_labels(answers, NAMES, 100)
    assert (found.scores["matthews"].low, found.scores["matthews"].method) == (-1, "too few")
    with pytest.raises(DataError, match="4 units are too few"):
        compare_labels(answers, answers, 3, 100)


def test_what_is_shown_is_what_is_told():
    found = score_labels(answers_of(), NAMES, 100)
    facts = json.loads(json.dumps(found.facts()))
    assert facts["classes"]["yes"]["support"] == found.classes[1].support
    assert facts["macro_f1"]["low"] < facts["macro_f1"]["value"]
    assert found.lines()[0].startswith("accuracy   0.") and "(wilson)" in found.lines()[0]
    assert len(found.lines()) == 3 + 1 + 4
