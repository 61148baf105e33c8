"""Classifiers on labelled data: each document alone gives the same answers; packing and order change nothing."""

import json

import numpy as np
import pytest
import torch
from sklearn import metrics
from tokenizers import Tokenizer

from pretrain.artifact.average import average_checkpoints
from pretrain.artifact.open import open_artifact
from pretrain.errors import DataError
from pretrain.evaluation.corpus import CorpusOptions
from pretrain.evaluation.held_out import evaluate_held_out
from pretrain.types import Batch
from tests.unit.evaluation.label_runs import CLASSES, LABELS, TAGS, write_label_run, write_labelled

ROWS = {"classes": CLASSES, "tags": TAGS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prepared classes and tags, and runs over them."""
    folder = tmp_path_factory.mktemp("labels")
    for kind, rows in ROWS.items():
        write_labelled(folder / kind, kind, rows)
        write_label_run(folder / f"{kind}-run", folder / kind, kind)
        write_label_run(folder / f"{kind}-other", folder / kind, kind, step=2)
    return folder


def by_hand(run, data, kind):
    """Gold labels, answers and losses in float64, one document after another."""
    model = open_artifact(run).model.double()
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    first, last = (tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]"))
    found = []
    for row in ROWS[kind]:
        words = [row["text"]] if kind == "classes" else row["tokens"]
        pieces = [tokenizer.encode(word, add_special_tokens=False).ids for word in words]
        ids = torch.tensor([[first, *(token for piece in pieces for token in piece), last]])
        with torch.no_grad():
            scores = model(Batch(ids, ids)).logits_BTV[0].log_softmax(dim=-1)
        places = [0] if kind == "classes" else np.cumsum([1, *map(len, pieces)])[:-1].tolist()
        names = [row["label"]] if kind == "classes" else row["tags"]
        for place, name in zip(places, names, strict=True):
            gold = LABELS[kind].index(name)
            found.append((gold, int(scores[place].argmax()), -float(scores[place, gold])))
    return [np.array(column) for column in zip(*found, strict=True)]


@pytest.mark.parametrize("kind", ["classes", "tags"])
def test_a_classifier_is_scored_as_its_documents_are_one_by_one(folder, kind):
    report = evaluate_held_out(folder / f"{kind}-run", CorpusOptions(batch_tokens=100), resamples=100)
    (found,) = report.losses
    gold, predicted, nll = by_hand(folder / f"{kind}-run", folder / kind, kind)
    assert report.objective == {"classes": "classify", "tags": "tag"}[kind]
    assert found.labels.confusion.tolist() == metrics.confusion_matrix(gold, predicted).tolist()
    assert found.labels.num_documents == len(ROWS[kind])
    assert (found.report.num_targets, found.report.num_correct) == (len(gold), int((gold == predicted).sum()))
    assert found.report.loss == pytest.approx(nll.mean(), rel=1e-5)
    facts = json.loads(json.dumps(report.facts()))["sources"]["data"]
    assert "perplexity" not in facts
    scores = facts["labels"]
    assert scores["macro_f1"]["value"] == pytest.approx(metrics.f1_score(gold, predicted, average="macro"))
    assert "perplexity" not in "".join(report.lines()), "a number of words, which labels are not"
    assert [line.split()[0] for line in report.lines()[2:6]] == ["accuracy", "macro_f1", "matthews", "class"]


def test_two_classifiers_are_compared_over_documents(folder):
    report = evaluate_held_out(folder / "tags-run", CorpusOptions(), other=folder / "tags-other", resamples=100)
    alone = [
        evaluate_held_out(folder / name, CorpusOptions(), resamples=100).losses[0]
        for name in ("tags-run", "tags-other")
    ]
    (found,) = report.losses
    assert found.differences.keys() == {"loss", "accuracy", "macro_f1", "matthews"}
    for name in ("accuracy", "macro_f1", "matthews"):
        mine, its = (one.labels.scores[name].value for one in alone)
        assert found.differences[name].value == pytest.approx(mine - its, abs=1e-12)
        assert (found.differences[name].unit, found.differences[name].num_units) == ("documents", len(TAGS))
    assert found.differences["loss"].value == pytest.approx(alone[0].report.loss - alone[1].report.loss, abs=1e-12)
    assert sum("paired bootstrap, 16 documents, 100 draws" in line for line in report.lines()) == 4


@pytest.mark.parametrize("kind", ["classes", "tags"])
def test_a_model_folder_is_evaluated_by_the_labels_of_the_data(folder, tmp_path, kind):
    average_checkpoints([folder / f"{kind}-run"], 1, tmp_path / "mean")
    choice = CorpusOptions(data=(str(folder / kind),), seq_len=48)
    found, own = (
        evaluate_held_out(path, choice, resamples=100) for path in (tmp_path / "mean", folder / f"{kind}-run")
    )
    assert found.objective == own.objective
    assert found.losses[0].labels.confusion.tolist() == own.losses[0].labels.confusion.tolist()


def test_data_with_other_labels_are_refused(folder, tmp_path):
    rows = [row | {"label": row["label"].upper()} for row in CLASSES]
    data = write_labelled(tmp_path / "upper", "classes", rows)
    with pytest.raises(
        DataError, match=r"its labels are MIXED, NEG, POS, those of .* mixed, neg, pos; prepare the data"
    ):
        evaluate_held_out(folder / "classes-run", CorpusOptions(data=(str(data),)))
