"""`pretrain pretrain` and `pretrain translate`: their commands, minutes, and what is refused."""

import json
import re

import pytest

from pretrain import cli

TINY = ("batch.global_tokens=512", "batch.micro=4", "tracking.wandb=off")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with texts of two languages."""
    monkeypatch.chdir(tmp_path)
    lines = [f"The cat number {number} sees the dog.\n" for number in range(300)]
    (tmp_path / "mine.en").write_text("".join(lines))
    (tmp_path / "mine.de").write_text("".join(lines).upper())
    (tmp_path / "mine.txt").write_text("".join(lines))
    (tmp_path / "empty.en").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "name", "recipe"),
    [
        (["pretrain", "mine.txt"], "pretrain-mine", "quickstart"),
        (["pretrain", "mine.txt", "--recipe", "rnn_quickstart", "--name", "first"], "first", "rnn_quickstart"),
        (["translate", "mine.en", "mine.de"], "translate-mine", "translator"),
    ],
)
def test_a_dry_run_prints_each_command(folder, capsys, arguments, name, recipe):
    assert cli.run([*arguments, "optim.lr=0.1", "--minutes", "3", "--dry-run"]) == 0
    prepare, train, evaluate = capsys.readouterr().out.splitlines()
    assert f"data/{name}" in prepare
    assert train.startswith(f"$ pretrain train {recipe} run.name={name} data.path=data/{name} ")
    assert train.endswith(" optim.lr=0.1 train.steps=BY_PACE")
    assert evaluate == f"$ pretrain evaluate runs/{name}"
    assert not (folder / "data").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["translate", "mine.en", "none.de"], "none.de: no such file; correct the path"),
        (["translate", "empty.en", "mine.de"], "empty.en: an empty file;"),
        (["pretrain", "mine.txt", "--minutes", "1", "train.steps=3"], "and train.steps too; leave one out"),
        (["pretrain", "mine.txt", "--minutes", "0"], "'--minutes'"),
        (["pretrain", "mine.txt", "train.stepz=3"], "did you mean 'train.steps'"),
        (["pretrain", "mine.txt", "--recipe", "quickstrat"], "did you mean quickstart"),
        (["quickstart", "--minutes", "3"], "--minutes, --ranks and --gpu go with --chat"),
        (["quickstart", "--chat", "--gpu", "--ranks", "2"], "--ranks are of a CPU"),
        (["data", "dialogue", "."], "exists"),
        (["evaluate", "mine", "--plain"], "--plain is for --questions; leave it out"),
        (["evaluate", "mine", "--questions", "a", "--tasks", "b"], "ambiguous evaluation target"),
    ],
)
def test_a_wish_that_cannot_be_fulfilled_is_refused_in_one_line(folder, capsys, arguments, message):
    assert cli.run(arguments) in (64, 65)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        ["pretrain", "mine.txt", "model.preset=gpt2-tiny", *TINY],
        ["translate", "mine.en", "mine.de", "tracking.wandb=off", "batch.global_tokens=256", "batch.micro=2"],
    ],
)
def test_minutes_become_steps_which_a_second_start_keeps(folder, warm, arguments):
    command = [*arguments, "--minutes", "0.1", "--name", "mine"]
    first = warm(*command, cwd=folder)
    assert first.code == 0, first.stderr
    steps = int(
        re.search(r"^-- a step takes .*: ([\d,]+) steps in 0.1 minutes$", first.stdout, re.M)[1].replace(",", "")
    )
    rows = [json.loads(row) for row in (folder / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows) == steps
    last = first.stdout.splitlines()[-1]
    assert last.startswith("next: pretrain generate runs/mine")
    again = warm(*command, cwd=folder)
    assert f"runs/mine is complete: {steps:,} steps" in again.stdout and again.stdout.splitlines()[-1] == last


@pytest.mark.long
def test_a_model_is_taught_to_answer_and_a_second_start_is_done(folder, warm):
    command = ["quickstart", "--chat", "--minutes", "1", "--ranks", "1"]
    first = warm(*command, cwd=folder)
    assert first.code == 0, first.stderr
    evaluated = re.findall(r"^  all +(0[.]\d+)  \d+ of 200 ", first.stdout, re.M)
    assert len(evaluated) == 4 and float(evaluated[0]) < float(evaluated[2])
    assert "learned | " in first.stdout
    last = first.stdout.splitlines()[-1]
    assert last == "next: pretrain chat runs/chat-1-preferred --temperature 0"
    again = warm(*command, cwd=folder)
    assert again.stdout.count(" is complete: ") == 5 and again.stdout.splitlines()[-1] == last
