"""`pretrain evaluate` as a process: translations and losses, bad input, Ctrl-C."""

import itertools
import json
import shutil
import signal
from typing import Any

import pytest

from pretrain import cli
from pretrain.evaluation import translation
from pretrain.evaluation.translation import read_texts
from pretrain.model import Transformer
from tests.helpers.fork_server import SHARED
from tests.unit.artifact.runs import TEXTS, write_run, write_text_run, write_texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A translator and a decoder with random weights, and a test set."""
    folder = tmp_path_factory.mktemp("evaluate")
    write_run(folder / "mt", steps=[1, 2])
    write_texts(folder / "texts", TEXTS * 8)
    write_text_run(folder / "gpt", folder / "texts", "llama-tiny", "causal")
    (folder / "test.en").write_text("".join(f"{text}\n" for text in TEXTS))
    (folder / "test.de").write_text("".join(f"{text.swapcase()}\n" for text in TEXTS))
    (folder / "short.de").write_text("ja\n")
    (folder / "long.en").write_text("word " * 200 + "\n")
    return folder


TEST = ["--source", "test.en", "--reference", "test.de", "--max-tokens", "8", "--resamples", "100"]


@pytest.mark.long
def test_a_translator_is_scored_greedy_and_with_beams_in_one_call(folder, warm, tmp_path):
    done = warm("evaluate", "mt", *TEST, "--beams", "1,3", "--output", str(tmp_path / "out"), "--json", cwd=folder)
    assert (done.code, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert [system["beams"] for system in facts["systems"]] == [1, 3]
    assert facts["systems"][0]["scores"].keys() == {"bleu_tokenized", "bleu", "bleu_lowercase", "chrf"}
    assert {paired["metric"] for paired in facts["compared"]} == facts["systems"][0]["scores"].keys()
    assert len(read_texts(tmp_path / "out.beam3")) == len(TEXTS)
    shown = warm("evaluate", "mt", *TEST, "--beams", "1,3", cwd=folder).stdout.splitlines()
    assert shown[0].startswith("mt, greedy: 4 sentences in ")
    assert any(line.startswith("mt, beam 3 against mt, greedy") for line in shown)
    assert all("nrefs:1|" in line for line in shown if line.startswith("  "))


def test_a_model_is_measured_on_its_own_data_and_on_others(folder, warm):
    own = warm("evaluate", "gpt", cwd=folder)
    other = warm("evaluate", "gpt", "--data", "texts", "--split", "train", cwd=folder)
    assert (own.code, other.code) == (0, 0), own.stderr + other.stderr
    line = own.stdout.splitlines()[1]
    # Both splits hold the same texts here.
    assert line == other.stdout.splitlines()[1]
    assert all(word in line for word in ("loss", "perplexity", "bits per byte", "accuracy", "targets"))
    kept = [json.loads(row) for row in (folder / "gpt" / "evaluations.jsonl").read_text().splitlines()]
    assert [(row["step"], row["settings"]["split"]) for row in kept] == [(1, "validation"), (1, "train")]
    # The folder is the same, said in two ways.
    assert len({row["data"][0]["sha256"] for row in kept}) == 1


def test_two_models_are_compared_on_the_same_rows_and_a_run_that_cannot_keep_it_is_a_warning(folder, warm, tmp_path):
    (tmp_path / "gpt").mkdir()
    for path in (folder / "gpt").iterdir():
        if path.name != "evaluations.jsonl":
            (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / "gpt" / path.name)
    (tmp_path / "gpt" / "evaluations.jsonl").mkdir()
    done = warm("evaluate", str(tmp_path / "gpt"), "--compare", "gpt", "--seq-len", "16", "--json", cwd=folder)
    assert (done.code, done.stderr.count("\n")) == (0, 1)
    assert (
        f"the result could not be kept: {tmp_path}/gpt/evaluations.jsonl: cannot append: Is a directory" in done.stderr
    )
    facts = json.loads(done.stdout)
    for name in ("loss", "accuracy"):
        found = facts["sources"]["data"]["differences"][name]
        assert (found["value"], found["p_value"], found["unit"]) == (0, 1, "rows")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["mt", "--source", "test.en"],
            64,
            "--source needs --reference, which is missing; give --data, --tasks, --questions,",
        ),
        (["mt", *TEST, "--data", "texts"], 64, "ambiguous evaluation target"),
        (["mt", "--source", "test.en", "--reference", "short.de"], 65, "short.de: has 1 lines, test.en has 4"),
        (["mt", "--source", "none.en", "--reference", "test.de"], 64, "none.en: cannot read it: No such file"),
        (["mt", "--source", "long.en", "--reference", "short.de"], 64, "long.en:1: the prompt has"),
        (["gpt", *TEST], 64, "this one has a decoder alone; give --data, for its loss"),
        (["mt", *TEST, "--beams", "0"], 64, "--beams 0 is no list of beam sizes"),
        (["mt", *TEST, "--length-penalty", "99"], 64, "length_penalty=99"),
        (["mt", *TEST, "--repetition-penalty", "0"], 64, "repetition_penalty=0.0 must be above 0"),
        (["nothing", *TEST], 66, "nothing: neither a checkpoint nor a run with one"),
        (["gpt", "--data", "mt-data"], 64, "objective.kind=causal on text or records, and the data are pairs"),
        (["gpt", "--split", "test"], 65, "there is no split 'test'"),
        (["gpt", "--compare", "nothing"], 66, "nothing: neither a checkpoint nor a run with one"),
        (["gpt", "--data", "texts", "--tasks", "arc"], 64, "ambiguous evaluation target"),
        (["gpt", "--device", "tpu"], 64, "--device tpu is unknown"),
    ],
)
def test_what_makes_no_sense_is_one_line(folder, warm, arguments, code, message):
    done = warm("evaluate", *arguments, cwd=folder)
    assert (done.code, done.stdout, len(done.errors), done.stderr.count("\n")) == (code, "", 1, 1), done.stderr
    assert message in done.errors[0]


def interrupt_in_a_search(arguments: list[str]) -> int:
    """Runs a command, in a fork; Ctrl-C comes when a beam search has taken some of its steps."""
    search, steps = translation.beam_search, itertools.count()

    def interrupted(model: Transformer, *others: Any, **options: Any) -> Any:
        def note(*unused: Any) -> None:
            if next(steps) == 3:
                signal.raise_signal(signal.SIGINT)

        model.decoder.register_forward_hook(note)
        return search(model, *others, **options)

    translation.beam_search = interrupted
    return cli.run(arguments)


def test_an_interrupt_is_one_line(folder, tmp_path):
    said = tmp_path / "stdout", tmp_path / "stderr"
    arguments = ["evaluate", str(folder / "mt"), "--beams", "5"]
    arguments += ["--source", str(folder / "test.en"), "--reference", str(folder / "test.de")]
    call = {"arguments": arguments}
    (code,) = SHARED.wait(SHARED.start(f"{__name__}:interrupt_in_a_search", [call], [said]))
    assert (code, *(path.read_text() for path in said)) == (128 + signal.SIGINT, "", "interrupted\n")
