"""The row of an evaluation during a run."""

from dataclasses import replace
from typing import Any

import pytest

from pretrain.evaluation.row_loss import LossReport
from pretrain.kinds.objective import Shown
from pretrain.training.build import ValidationSource
from pretrain.training.loop import _describe

NONE: Any = None
WEB, CODE = (ValidationSource(name, NONE, NONE, ratio) for name, ratio in (("web", 0.5), ("code", 0.25)))


def test_a_row_has_all_splits_together_and_the_loss_of_each():
    row = _describe([WEB, CODE], [LossReport(2.0, 10, 4), LossReport(3.0, 30, 6)])
    bits = row.pop("val_bits_per_byte")
    assert row.pop("val_perplexity") == pytest.approx(15.64, abs=0.01)
    assert row == {
        "val_loss_web": 2.0,
        "val_loss_code": 3.0,
        "val_loss": 2.75,
        "val_accuracy": 0.25,
        "val_tokens": 40.0,
    }
    assert bits == pytest.approx(1.1336, abs=1e-4), "all bits over all bytes: 158.7 over 140"


def test_one_split_is_not_told_twice_and_unknown_bytes_not_at_all():
    row = _describe([replace(WEB, tokens_per_byte=0.0)], [LossReport(2.0, 10, 4)])
    assert row.keys() == {"val_loss", "val_perplexity", "val_accuracy", "val_tokens"}


def test_the_row_of_a_classifier_counts_labels_and_has_no_perplexity():
    row = _describe([replace(WEB, tokens_per_byte=0.0)], [LossReport(0.5, 10, 4)], counted="labels", scores_words=False)
    assert row == {"val_loss": 0.5, "val_accuracy": 0.4, "val_labels": 10.0}


def test_the_row_of_pixels_has_a_loss_alone():
    row = _describe([replace(WEB, tokens_per_byte=0.0)], [LossReport(0.5, 10, 0)], chooses=False, scores_words=False)
    assert row == {"val_loss": 0.5, "val_tokens": 10.0}


def test_no_target_is_no_loss_and_not_the_best_one():
    assert _describe([WEB], [LossReport(0.0, 0, 0)]) == {}
    assert "val_loss_web" not in _describe([WEB, CODE], [LossReport(0.0, 0, 0), LossReport(3.0, 30, 6)])


def test_the_rewards_of_pairs_are_means_over_all_sources():
    reports = [LossReport(0.5, 10, 8, (0.25, 0.5)), LossReport(0.25, 30, 30, (0.75, 0.5))]
    row = _describe([WEB, CODE], reports, "pairs", Shown(("rewards/margins", "rewards/chosen")), scores_words=False)
    assert (row["val_pairs"], row["val_accuracy"]) == (40, 0.95)
    assert (row["val_rewards/margins"], row["val_rewards/chosen"]) == (0.625, 0.5)
    assert not row.keys() & {"val_perplexity", "val_tokens"}


@pytest.mark.parametrize("scores_words", [True, False])
def test_perplexity_is_of_words_whether_or_not_the_loss_shows_further_sums(scores_words):
    row = _describe([WEB], [LossReport(2.0, 10, 4, (0.5,))], "tokens", Shown(("z_loss",)), scores_words=scores_words)
    assert (row["val_z_loss"], row["val_tokens"]) == (0.5, 10)
    assert ("val_perplexity" in row) == scores_words
