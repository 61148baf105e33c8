"""Records of published results: their steps are commands that exist, their table is that of the results."""

import re
import shlex

import pytest

from pretrain import cli
from pretrain.cli.wish_commands.command_steps import CommandSteps
from pretrain.config import reproduction
from pretrain.config.load import load_config, load_section
from pretrain.config.prepare import PrepareConfig
from pretrain.config.reproduction import FigurePlace, load_reproduction, load_reproductions
from pretrain.errors import ConfigError, DataError
from tests.helpers.documents import ROOT

RECORDS = load_reproductions()
STEPS = [(name, step) for name, record in RECORDS.items() for step in record.steps]


def test_twelve_results_and_more_have_a_command():
    assert len(RECORDS) >= 12


@pytest.mark.parametrize(("name", "step"), STEPS)
def test_a_step_is_a_command_whose_keys_exist(name, step, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [re.sub(r"\{(corpus|images|few|text)\}", "place", word) for word in shlex.split(step)]
    if words[0] == "python":
        assert words[1] == "-m" and (ROOT / f"{words[2].replace('.', '/')}.py").is_file()
        return
    if ">" in words:
        words = words[: words.index(">")]
    assert words[0] == "pretrain" and cli.run([*words[1:], "--help"]) == 0
    keys = [word for word in words if re.match(r"[a-z_]+(\.[\w]+)*=", word)]
    has_start = any(key.startswith("init.from=") for key in keys)  # a run of an earlier step
    if words[1] == "prepare" and not words[2].startswith("-"):
        load_section(PrepareConfig, words[2], keys)
    elif words[1] == "train" and not (has_start or words[2].startswith("runs/")):
        config = load_config(words[2], keys)
        assert config.run.name.startswith(f"reproduce-{name}"[:13])
    capsys.readouterr()


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_asks_for_what_its_steps_use_and_reads_what_they_write(name):
    record = RECORDS[name]
    used = {need for step in record.steps for need in re.findall(r"\{(\w+)\}(?=\s|/|$)", step)}
    assert used == set(record.needs)
    assert record.figure.value.file.startswith("runs/reproduce-")
    assert [row.at for row in record.measured] == sorted(row.at for row in record.measured)


def test_the_table_of_the_results_is_that_of_the_records(capsys):
    assert cli.run(["reproduce", "--list", "--markdown"]) == 0
    table = capsys.readouterr().out
    text = (ROOT / "benchmarks/results.md").read_text()
    section = text.split("## Published results\n", 1)[1].split("\n## ", 1)[0]
    shown = "".join(line for line in section.splitlines(keepends=True) if line.startswith("|"))
    assert shown == table, "paste the output of pretrain reproduce --list --markdown"


RECORD = """
title: a test
published: "1.0 (a source)"
cost: nothing
needs: {text: "from a place"}
steps: ["pretrain prepare --input {text} --output data/x", "pretrain inspect runs/x --json > runs/x.json"]
figure: {name: loss, value: {file: runs/x.json, key: a/0/b}, less: {file: runs/x.jsonl, key: c}}
expected: [0.4, 0.6]
measured: [{value: 0.7, at: 2026-11-28, where: here}]
"""


@pytest.fixture
def record(tmp_path, monkeypatch):
    """A record of its own, in an empty folder."""
    folder = tmp_path / "configs/reproduce"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(RECORD)
    (folder / "gone.yaml").write_text(re.sub("steps: .*", "steps: []\nlacking: a corpus", RECORD))
    (folder / "card.yaml").write_text(RECORD + "machine: gpu\n")
    (folder / "script.yaml").write_text(RECORD.replace('"pretrain prepare', '"python -m benchmarks.x'))
    monkeypatch.setattr(reproduction, "builtin_configs", lambda: tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my text").touch()
    return folder / "mine.yaml"


def test_a_result_is_run_measured_and_judged_and_continued(record, monkeypatch, capsys):
    commands = []
    codes = [0, 3, 0]

    def run(self, arguments, stop=None):
        commands.append(arguments)
        return codes.pop(0)

    monkeypatch.setattr(CommandSteps, "run", run)
    paths = record.parents[2]
    (paths / "runs").mkdir()
    (paths / "runs/x.json").write_text('{"a": [{"b": 1.5}]}')
    (paths / "runs/x.jsonl").write_text('{"c": 9}\n{"c": 1}\n{"d": 2}\n')
    assert cli.run(["reproduce", "mine", "text=my text"]) == 3  # of its second command
    assert cli.run(["reproduce", "mine", "text=my text"]) == 0
    assert commands[0] == ["prepare", "--input", "my text", "--output", "data/x"]
    assert commands[1:] == [["inspect", "runs/x", "--json", ">", "runs/x.json"]] * 2
    out = capsys.readouterr().out
    assert "-- done before, by runs/reproduce-mine.done: pretrain prepare --input 'my text'" in out
    assert "mine: loss 0.5, expected 0.4 to 0.6: reproduced\npublished: 1.0 (a source)" in out
    (paths / "runs/x.jsonl").write_text('{"c": 1.4}\n')
    assert cli.run(["reproduce", "mine", "text=my text"]) == 1
    assert "loss 0.1, expected 0.4 to 0.6: MISSED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["mime"], 64, "no such result: mime; did you mean mine"),
        (["mine"], 65, "mine: text is missing: from a place; then pretrain reproduce mine text=PATH"),
        (["mine", "text=none"], 65, "text is not at none: from a place"),
        (["mine", "words=my text"], 64, "words=my text is not asked for; it needs text=PATH"),
        (["gone"], 64, "gone: no steps lead there yet: a corpus"),
        (["card", "text=my text"], 69, "card: needs a GPU, and torch sees none"),
        (["script", "text=my text"], 69, "a step is a script of the repository, which is not in this folder"),
    ],
)
def test_a_result_that_cannot_be_run_is_refused_in_one_line(record, capsys, arguments, code, message):
    assert cli.run(["reproduce", *arguments]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_the_list_says_what_was_measured_last(record, capsys):
    assert cli.run(["reproduce"]) == 0
    out = capsys.readouterr().out
    assert "mine: MISSED; loss 0.7, expected 0.4 to 0.6, 2026-11-28, here\n    a test\n" in out
    assert "    cost: nothing, needs text\n" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("expected: [0.4, 0.6]", "expected: [0.6, 0.4]"), "is no interval"),
        (("at: 2026-11-28", "at: yesterday"), "measured"),
        (("cost: nothing", "price: 1"), "unknown key 'price'"),
        (("cost: nothing", "cost: none\nlacking: a corpus"), "needs steps or lacking"),
    ],
)
def test_a_bad_record_is_refused_by_key(record, change, message):
    record.write_text(RECORD.replace(*change))
    with pytest.raises(ConfigError, match=message):
        load_reproduction(record)


def test_a_figure_that_is_not_there_is_an_error_of_its_file(tmp_path):
    (tmp_path / "x.json").write_text('{"a": [1]}')
    for key in ("b", "a/1", "a/x", "a"):
        with pytest.raises(DataError, match=f"x.json: no {key} is there; see the output of the steps"):
            FigurePlace(file=str(tmp_path / "x.json"), key=key).read()


def test_the_output_of_a_step_goes_to_its_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert CommandSteps().run(["--version", ">", "runs/version.txt"]) == 0
    assert (tmp_path / "runs/version.txt").read_text().startswith("pretrain ")
    assert "$ pretrain --version > runs/version.txt" in capsys.readouterr().out
