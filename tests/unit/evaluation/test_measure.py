"""Scores of translations: equal to what sacrebleu gives when it is called directly."""

import sys

import pytest
import sacrebleu
import sacremoses
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from pretrain.config.prepare import NormalizeConfig
from pretrain.errors import LaunchError
from pretrain.evaluation.translation_metrics import Hypotheses, Measure

MOSES = NormalizeConfig(steps=["lowercase", "moses"], language="en", target_language="de")
REFERENCES = [
    "Ein Mann mit einem orangefarbenen Hut, der etwas anstarrt.",
    'Er sagt: "Das ist ja sch\u00f6n!"',
    "Zwei junge, wei\u00dfe M\u00e4nner sind im Freien in der N\u00e4he vieler B\u00fcsche.",
    "Mehrere M\u00e4nner mit Schutzhelmen bedienen ein Antriebsradsystem.",
] * 5
TOKENIZED = [
    "ein mann mit einem hut , der etwas anstarrt .",
    'er sagt : " das ist ja gut ! "',
    "zwei m\u00e4nner sind im freien in der n\u00e4he vieler b\u00fcsche .",
    "m\u00e4nner mit helmen bedienen ein system .",
] * 5
CASED = [text.replace("orangefarbenen ", "").replace("junge, ", "") for text in REFERENCES]
OURS, THEIRS = Hypotheses("ours", TOKENIZED, MOSES), Hypotheses("theirs", CASED, None)


def moses(text):
    return sacremoses.MosesTokenizer("de").tokenize(text.lower(), return_str=True, escape=False)


def joined(text):
    return sacremoses.MosesDetokenizer("de").detokenize(text.split())


def scores(measure, system):
    return {found.metric: found for found in measure.score(system)}


def test_scores_of_normalised_text_are_those_of_sacrebleu():
    found = scores(Measure(REFERENCES, MOSES), OURS)
    references = [moses(text) for text in REFERENCES]
    texts = [joined(text) for text in TOKENIZED]
    assert list(found) == ["bleu_tokenized", "bleu", "bleu_lowercase", "chrf"]
    expected = {
        "bleu_tokenized": sacrebleu.corpus_bleu(TOKENIZED, [references], tokenize="none", force=True),
        "bleu": sacrebleu.corpus_bleu(texts, [REFERENCES]),
        "bleu_lowercase": sacrebleu.corpus_bleu(texts, [REFERENCES], lowercase=True),
        "chrf": CHRF(lowercase=True).corpus_score(texts, [REFERENCES]),
    }
    assert {name: one.score for name, one in found.items()} == {name: one.score for name, one in expected.items()}
    assert found["bleu_tokenized"].score > 30 > found["bleu"].score
    assert "tok:none" in found["bleu_tokenized"].signature
    assert "tok:13a" in found["bleu"].signature
    assert "case:mixed" in found["bleu"].signature
    assert "case:lc" in found["bleu_lowercase"].signature
    assert all(f"version:{sacrebleu.__version__}" in one.signature for one in found.values())
    assert "BP = " in found["bleu"].details


def test_text_as_it_is_has_the_scores_of_text_alone():
    found = scores(Measure(REFERENCES, None), THEIRS)
    assert {name: one.score for name, one in found.items()} == {
        "bleu": sacrebleu.corpus_bleu(CASED, [REFERENCES]).score,
        "chrf": sacrebleu.corpus_chrf(CASED, [REFERENCES]).score,
    }


def test_preprocessed_text_is_compared_as_it_is():
    references = [moses(text) for text in REFERENCES]
    found = scores(Measure(references, MOSES, preprocessed=True), OURS)
    assert {name: one.score for name, one in found.items()} == {
        "bleu_tokenized": sacrebleu.corpus_bleu(TOKENIZED, [references], tokenize="none", force=True).score,
        "chrf": sacrebleu.corpus_chrf(TOKENIZED, [references]).score,
    }


def test_a_system_of_plain_text_is_tokenized_for_the_measure_of_another():
    found = scores(Measure(REFERENCES, MOSES), THEIRS)
    ours, references = ([moses(text) for text in texts] for texts in (CASED, REFERENCES))
    assert found["bleu_tokenized"].score == sacrebleu.corpus_bleu(ours, [references], tokenize="none", force=True).score
    assert found["bleu"].score == sacrebleu.corpus_bleu(CASED, [REFERENCES]).score


def test_the_paired_bootstrap_is_that_of_sacrebleu():
    (_, bleu, *_) = Measure(REFERENCES, MOSES).compare(OURS, THEIRS, 200)
    named = [("a", [joined(text) for text in TOKENIZED]), ("b", CASED)]
    signatures, results = PairedTest(named, {"BLEU": BLEU()}, [REFERENCES], "bs", 200)()
    first, second = results["BLEU"]
    assert (bleu.baseline, bleu.system, bleu.difference) == ("ours", "theirs", second.score - first.score)
    assert (bleu.p_value, bleu.baseline_ci, bleu.system_ci) == (second.p_value, first.ci, second.ci)
    assert bleu.signature == str(signatures["BLEU"])
    assert "bs:200|seed:12345" in bleu.signature


def test_a_system_does_not_differ_from_itself():
    found = Measure(REFERENCES, MOSES).compare(OURS, OURS, 200)
    assert {(paired.difference, paired.p_value) for paired in found} == {(0.0, 1.0)}


def test_only_what_moses_parted_is_joined_again():
    text = ["ja , so !"]
    assert Measure(text, MOSES).in_form(Hypotheses("a", text, MOSES), "text") == ["ja, so!"]
    assert Measure(text, MOSES, preprocessed=True).in_form(Hypotheses("a", text, MOSES), "text") == text
    for normalize in (NormalizeConfig(steps=["lowercase"]), None):
        assert Measure(text, normalize).in_form(Hypotheses("a", text, normalize), "text") == text


def test_without_sacrebleu_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(LaunchError, match=r"computed by sacrebleu, which is not installed; run .* -e '\.\[eval\]'"):
        Measure(REFERENCES, None)
