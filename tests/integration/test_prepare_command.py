"""`pretrain prepare` as a command: by a config, by options, and by shares."""

import json
import signal

import pytest

from pretrain import cli
from pretrain.shards.index import load_index
from pretrain.utils.io import set_fault_hook
from tests.helpers.cli import run_warm
from tests.helpers.corpus import digests, write_corpus

CONFIG = """\
output: by_config
inputs: [{path: in}]
tokenizer: {kind: bpe, vocab_size: 300}
"""


@pytest.fixture
def folder(tmp_path):
    write_corpus(tmp_path / "in")
    (tmp_path / "a.yaml").write_text(CONFIG)
    return tmp_path


def test_a_config_and_options_that_say_the_same_write_the_same(folder):
    by_config = run_warm("prepare", "a.yaml", cwd=folder)
    options = ["--output", "by_options", "--vocab-size", "300", "--processes", "1"]
    by_options = run_warm("prepare", "--input", "in", *options, cwd=folder)
    assert (by_config.code, by_options.code) == (0, 0), by_config.stderr + by_options.stderr
    assert digests(folder / "by_config") == digests(folder / "by_options")
    assert by_config.stdout.startswith("by_config: ") and by_config.stdout.endswith("bytes per token\n")


def test_overrides_are_laid_over_a_config(folder):
    overrides = ["output=other", "tokenizer.vocab_size=301"]
    result = run_warm("prepare", "a.yaml", *overrides, "--processes", "1", cwd=folder)
    assert result.code == 0, result.stderr
    assert load_index(folder / "other").vocab_size == 301


def test_shares_say_whether_others_are_awaited(folder):
    arguments = ("prepare", "a.yaml", "part_bytes=1500", "--processes", "1", "--part")
    first = run_warm(*arguments, "1/2", cwd=folder)
    assert first.stdout == "by_config: part 1/2 is done; the last one to finish writes the index\n", first.stderr
    assert "training tokens" in run_warm(*arguments, "2/2", cwd=folder).stdout
    assert json.loads((folder / "by_config/statistics.json").read_text())["splits"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["a.yaml", "--split", "hash:0"], "error: pretrain prepare: Invalid value: --split does not go with CONFIG"),
        (["a.yaml", "--output", "x"], "error: pretrain prepare: Invalid value: --output does not go with CONFIG"),
        (
            ["a.yaml", "--input", "b.txt", "--vocab-size", "3e2"],
            "error: pretrain prepare: Invalid value: --input does not go with CONFIG a.yaml: write inputs.0.path=b.txt",
        ),
        (
            ["--input", "b.txt", "--output", "x", "--vocab-size", "1.5"],
            "error: pretrain prepare: Invalid value for '--vocab-size': 1.5 is no whole number from 0, such as 5000000",
        ),
        (["a.yaml", "shards=3"], "error: override 'shards=3': unknown key 'shards'; "),
        (["none.yaml"], "error: none.yaml: no such config file; check the path"),
        (["a.yaml", "--part", "3/2"], "error: part='3/2' is not a part; use i/n with 1 <= i <= n, such as 1/4"),
    ],
)
def test_what_cannot_be_is_one_line(folder, arguments, line):
    result = run_warm("prepare", *arguments, cwd=folder)
    assert result.code == 64
    assert result.stderr.startswith(line), result.stderr
    assert result.stderr.count("\n") == 1
    assert not (folder / "by_config").exists()


def test_what_is_too_long_is_refused_by_the_limit_of_the_short_form(folder):
    line = "in/a.jsonl:1: a line is longer than max_document_bytes=100; raise it (--max-document-bytes, or"
    command = ("prepare", "--input", "in", "--output", "out", "--processes", "1", "--max-document-bytes")
    result = run_warm(*command, "100", cwd=folder)
    assert (result.code, result.stderr.startswith(f"error: {line}")) == (65, True), result.stderr
    result = run_warm(*command, "0", cwd=folder)
    assert result.code == 64
    assert result.stderr.startswith("error: --max-document-bytes: inputs.0.max_document_bytes=0: input should be gr")


def test_a_file_that_is_not_utf8_is_named_and_left_out_on_request(folder):
    (folder / "in/latin1.txt").write_bytes(b"sch\xf6n war es\n" * 9)
    command = ("prepare", "--input", "in", "--output", "out", "--vocab-size", "300", "--split", "tail:0.1")
    result = run_warm(*command, cwd=folder)
    assert (result.code, result.stderr.count("in/latin1.txt, byte 3: invalid UTF-8: byte 0xf6")) == (65, 1), (
        result.stderr
    )
    result = run_warm(*command, "--on-error", "skip", "--max-skipped-share", "0.5", cwd=folder)
    assert result.code == 0 and "skipped 1 document: not UTF-8" in result.stderr, result.stderr
    assert json.loads((folder / "out/statistics.json").read_text())["left_out"]["undecodable"] == 1
    assert "left out: in/latin1.txt, byte 3: invalid UTF-8" in result.stderr
    result = run_warm(*command, "--on-error", "ignore", cwd=folder)
    assert result.code == 64 and result.stderr.startswith("error: --on-error: "), result.stderr
    result = run_warm(*command, "--undecodable", "skip", cwd=folder)
    assert result.code == 64 and "--undecodable is now --on-error: write --on-error skip" in result.stderr


def test_ctrl_c_says_that_the_same_command_goes_on_and_it_does(folder, monkeypatch, capsys):
    def interrupt(operation, path):
        if path.name == "part-00002.json":
            raise KeyboardInterrupt

    monkeypatch.chdir(folder)
    command = ["prepare", "a.yaml", "part_bytes=1500", "--processes", "1"]
    set_fault_hook(interrupt)
    try:
        assert cli.run(command) == 128 + signal.SIGINT
    finally:
        set_fault_hook(None)
    told = capsys.readouterr()
    assert told.out == "" and told.err.endswith("interrupted; finished parts are kept: the same command continues\n")
    assert len(list((folder / "by_config/parts").glob("*.json"))) == 2
    assert cli.run(command) == 0
    assert cli.run([*command, "output=whole"]) == 0
    assert digests(folder / "by_config") == digests(folder / "whole")
