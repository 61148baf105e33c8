"""Results that a run keeps: a whole line each, whoever else appends; what cannot be kept is a warning and no more."""

import hashlib
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pretrain.checkpoint.format import MANIFEST
from pretrain.checkpoint.load import WeightReader
from pretrain.cli.evaluate import evaluate_command
from pretrain.errors import UnreadError
from pretrain.evaluation.evaluation_log import Data, Subject, find_subject, hash_lines, keep_evaluation
from pretrain.run.folder import RunDir
from tests.unit.checkpoint.stand_in import save

DATA = [Data("data", "data/web", "0" * 64)]


def subject(folder: Path) -> Subject:
    return Subject(RunDir(folder), "step-00000300", 300, "a" * 64)


def rows(folder: Path) -> list:
    return [json.loads(line) for line in (folder / "evaluations.jsonl").read_bytes().splitlines()]


def test_a_row_says_what_was_measured_on_what_and_how(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "geheimnis")
    result = {"kind": "loss", "sources": {"data": {"loss": 2.5, "perplexity": float("inf"), "bits_per_byte": None}}}
    settings = {"data": (Path("data/web?key=geheimnis"),), "split": "validation", "max_tokens": None}
    keep_evaluation(subject(tmp_path), DATA, settings, result)
    (row,) = rows(tmp_path)
    assert row.pop("at").endswith("+00:00") and row.pop("versions").keys() == {"pretrain", "torch"}
    assert row == {
        "step": 300,
        "checkpoint": "step-00000300",
        "manifest": "a" * 64,
        "data": [{"name": "data", "path": "data/web", "sha256": "0" * 64}],
        "settings": {"data": ["data/web?key=***"], "split": "validation", "max_tokens": None},
        "result": {"kind": "loss", "sources": {"data": {"loss": 2.5, "perplexity": None, "bits_per_byte": None}}},
    }


def test_the_confusion_of_labels_is_left_out(tmp_path):
    labels = {"accuracy": {"value": 0.5}, "confusion": [[1, 1], [1, 1]]}
    keep_evaluation(subject(tmp_path), DATA, {}, {"sources": {"data": {"labels": labels}}})
    assert rows(tmp_path)[0]["result"]["sources"]["data"]["labels"] == {"accuracy": {"value": 0.5}}


def test_the_checkpoint_is_known_by_its_manifest(tmp_path):
    (checkpoint,) = save(tmp_path / "run" / "checkpoints", 7)
    what = SimpleNamespace(name=checkpoint.name, run=RunDir(tmp_path / "run"), checkpoint=WeightReader(checkpoint))
    found = find_subject(what)
    assert (found.checkpoint, found.step) == (checkpoint.name, 7)
    assert found.sha256 == hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()
    assert find_subject(SimpleNamespace(name=checkpoint.name, run=None, checkpoint=None)) is None


def test_the_hash_of_lines_is_that_of_their_file(tmp_path):
    (tmp_path / "text").write_bytes("ein Satz\n\nnoch \u00e4iner\n".encode())
    expected = hashlib.sha256((tmp_path / "text").read_bytes()).hexdigest()
    assert hash_lines(["ein Satz", "", "noch \u00e4iner"]) == expected


@pytest.mark.parametrize("obstacle", ["no folder", "a folder of the name"])
def test_what_cannot_be_written_is_one_warning(tmp_path, caplog, obstacle):
    folder = tmp_path / "run"
    if obstacle == "a folder of the name":
        (folder / "evaluations.jsonl").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        keep_evaluation(subject(folder), DATA, {}, {})
    (record,) = caplog.records
    assert record.message.startswith("the result could not be kept: ")
    assert str(folder / "evaluations.jsonl") in record.message


def test_what_was_found_is_kept_though_nobody_reads_what_is_printed(monkeypatch, tmp_path):
    def refuse(_: str) -> None:
        raise UnreadError

    report = SimpleNamespace(subject=tmp_path, data="data", facts=dict, lines=lambda: ["loss 1.0"])
    kept = []
    monkeypatch.setattr("pretrain.evaluation.held_out.evaluate_held_out", lambda *_, **__: report)
    monkeypatch.setattr("pretrain.evaluation.evaluation_log.keep_evaluation", lambda subject, *_: kept.append(subject))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=refuse, flush=lambda: None))
    with pytest.raises(UnreadError):
        evaluate_command(tmp_path)
    assert kept == [tmp_path]
